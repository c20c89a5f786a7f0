"""SpecTr: k chains sampled independently, so that the target can choose among several continuations.

All chains start at the root and are grown together, one pass of the draft model per level. For ``kseq`` and ``transport``
chains with equal prefixes stay separate, because these rules need k independent guesses at every level. For rules that need
siblings without replacement, equal prefixes are merged in order of appearance: the distinct ones of independent draws are draws
without replacement. (Sun et al. 2023, arXiv 2310.15141.)

    x^(1), ..., x^(k) ~ q(. | s) independent,  x^(i) continued by its own chain
    P(next distinct token = v | the distinct ones so far) = q(v) / (1 - q(those))

Lossless under ``kseq``, ``transport``, ``recursive``, ``traversal`` and ``coupled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.equal_siblings import first_twins
from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.model.tree_drafter import TreeDrafter
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.levels import kept_part
from outrider.drafters.trees.shape import TreeShape
from outrider.drafters.trees.static import grow_shape


@dataclass(frozen=True)
class ManyChainsOptions:
    """Number of chains. The policy's ``num_draft_tokens`` is their length; ``num_tree_nodes`` can only cut them."""

    num_chains: int = 4
    """k: number of chains."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_chains, int) or self.num_chains < 1:
            raise OptionError(f"num_chains = {self.num_chains!r} is not valid; use a whole number of at least 1")


@final
class ManyChains(TreeDrafter):
    """k sampled chains, merged into a tree unless the rule wants them apart."""

    offers: ClassVar = (Draws.IID, Draws.WITHOUT_REPLACEMENT)

    def __init__(
        self, model: Target, options: ManyChainsOptions | None = None, *, vocab_size: int, draws: Draws = Draws.IID
    ) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=draws)
        self.options = options or ManyChainsOptions()

    def _grow(self, growth: DraftGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        chains = TreeShape.of_branching((self.options.num_chains, *[1] * (max(plan.max_depth) - 1)))
        draft, numbers = grow_shape(growth, plan, tree=chains, drawing=Drawing(Draws.IID))
        return (draft, numbers) if self.draws is Draws.IID else merged(draft, numbers)


def merged(draft: Draft, numbers: Tensor) -> tuple[Draft, Tensor]:
    """Merge equal siblings. Merged independent draws are draws without replacement."""
    tree, first = draft.tree, first_twins(draft.tree)
    assert draft.q is not None, "sampled guesses come with their q"
    kept = tree.valid & (first == torch.arange(tree.num_nodes, device=first.device))
    parents = first.gather(1, tree.parents.clamp(min=0))
    less, origin = kept_part(tree.tokens, parents, kept)
    q = draft.q.gather(1, origin[..., None].expand(-1, -1, draft.q.shape[2]))
    return Draft(less, Draws.WITHOUT_REPLACEMENT, q), numbers.gather(1, origin)


def build(parts: Parts) -> Drafter:
    return ManyChains(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="several independent chains from a draft model",
    paper="Sun et al. 2023, SpecTr (arXiv 2310.15141)",
    drafter=ManyChains,
    build=build,
    options=ManyChainsOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
