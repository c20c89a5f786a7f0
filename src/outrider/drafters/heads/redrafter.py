"""ReDrafter: a recurrent cell beside the target's state, searched by beams.

Candidates are the beams of a beam search, merged where they share a prefix: whole paths, not single nodes. (Zhang et al. 2024,
ReDrafter, arXiv 2403.09919.)

    state(node) = silu(W e(token of node) + U state(parent) + b),      q(. | node) = softmax(V res([h ; state(node)]))
    beams:  of the paths looked at, the likeliest of full depth, as many as the nodes of their union allow

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

import torch

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.device_growers import device_grower
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.recurrent import Recurrent
from outrider.drafters.heads.trained import trained_head
from outrider.drafters.trees.best_first import CandidatePool
from outrider.drafters.trees.levels import kept_part
from outrider.drafters.trees.options import BestFirstOptions
from outrider.models.heads.redrafter import KIND

if TYPE_CHECKING:
    from outrider.device.drafters.trees.growers import Grower


@final
class Redrafter(Recurrent):
    """Trees of the likeliest beams."""

    in_beams: ClassVar = True

    def _width(self, search: BestFirstOptions, plan: Plan) -> int:
        """All beams: the tree holds the best whole paths, and a good path may begin with an unlikely token."""
        del plan
        return search.width

    def _chosen(self, pool: CandidatePool, plan: Plan) -> TokenTree:
        return beam_tree(pool, plan)

    def _grower(self, shape: CapturedShape, target: Target) -> Grower | None:
        """Available if a whole path fits the tree."""
        if any(count < depth for depth, count in shape.guesses.items()):
            return None
        from outrider.device.drafters.trees.growers import choose_beams  # needs triton

        return device_grower(self.head, shape, target, static=self.static_tree, search=self.search, choose=choose_beams)


def beam_tree(pool: CandidatePool, plan: Plan) -> TokenTree:
    """Whole paths of every row's depth, the likeliest first, as long as their tree fits the row's number of nodes. The
    first path is always taken, cut if necessary."""
    num_rows, num_places = pool.tokens.shape
    parents, chances = pool.parents.tolist(), pool.chances.tolist()
    kept = torch.zeros(num_rows, num_places, dtype=torch.bool)
    for row in range(num_rows):
        kept[row, _beams(parents[row], chances[row], pool.depths, depth=plan.max_depth[row], room=plan.max_nodes[row])] = True
    return kept_part(pool.tokens, pool.parents, kept.to(pool.tokens.device))[0]


def _beams(parents: list[int], chances: list[float], depths: list[int], *, depth: int, room: int) -> list[int]:
    """Pool entries of one row's tree, the root included."""
    ends = sorted((place for place, at in enumerate(depths) if at == depth), key=lambda place: -chances[place])
    taken = {0}
    for end in ends if depth else []:
        path = [end]
        while parents[path[-1]] not in taken:
            path.append(parents[path[-1]])
        if len(taken) == 1:
            path = path[-room:] if room else []
        if len(taken) - 1 + len(path) > room:
            break
        taken.update(path)
    return sorted(taken)


def build(parts: Parts) -> Drafter:
    return Redrafter(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a recurrent cell beside the target's state, searched by beams (trained)",
    paper="Zhang et al. 2024, ReDrafter (arXiv 2403.09919)",
    drafter=Redrafter,
    build=build,
    defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
