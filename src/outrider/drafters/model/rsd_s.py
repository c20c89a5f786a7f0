"""RSD-S: a beam of W sampled paths, drawn without replacement along whole sequences.

Sampling children node by node may spend the budget on the children of unlikely nodes. A stochastic beam draws W *paths* per
level without replacement. Every path carries its log-probability phi and a Gumbel-perturbed score G. Children's scores are
drawn given that their largest is the parent's, and the W largest scores of a level are kept. Siblings stand in the order of
their scores, which is the order of sequential draws without replacement. (Jeon et al. 2024, "Recursive Speculative Decoding",
arXiv 2402.14160; stochastic beam search: Kool, van Hoof & Welling 2019, arXiv 1903.06059.)

    g_v = phi + log q(v) + Gumbel,   Z = max g;     s_v = G - g_v + log(1 - exp(g_v - Z))
    score_v = G - max(s_v, 0) - log(1 + exp(-|s_v|))          the largest child inherits G

Lossless under ``recursive`` (and ``coupled``). Given the elder siblings, *which* token comes next does not depend on the score
it comes with: the argmax of Gumbel-perturbed numbers does not depend on their maximum. So whether it stays in the beam does not
depend on which token it is. It is not lossless under ``traversal``: the nodes below one branch depend on the tokens of other
branches, and traversal judges them before those. For the same reason a budget cuts whole levels or the width of all levels,
never single nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.rng import Purpose
from outrider.core.sampling import Law
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.model.tree_drafter import TreeDrafter
from outrider.drafters.trees.levels import kept_part


@dataclass(frozen=True)
class StochasticBeamOptions:
    """The beam. The policy's ``num_draft_tokens`` is its depth; ``num_tree_nodes`` can only cut it."""

    width: int = 4
    """W: paths per level."""

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise OptionError(f"width = {self.width!r} is not valid; use a whole number of at least 1")


@final
class StochasticBeam(TreeDrafter):
    """Beams of sampled paths."""

    offers: ClassVar = (Draws.BEAM,)

    def __init__(self, model: Target, options: StochasticBeamOptions | None = None, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=Draws.BEAM)
        self.options = options or StochasticBeamOptions()

    def _grow(self, growth: DraftGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        widths = [min(self.options.width, nodes) for nodes in plan.max_nodes]
        limits = zip(plan.max_depth, plan.max_nodes, widths, strict=True)
        depths = [min(depth, nodes // width) if width else 0 for depth, nodes, width in limits]
        beam = _Beam(growth, widths)
        for depth in range(max(depths)):
            beam.add([depth < limit for limit in depths])
            if depth + 1 < max(depths):
                beam.expand(growth)
        tree, origin = kept_part(beam.tokens, beam.parents, beam.kept)
        q = torch.cat([*beam.laws, torch.zeros_like(beam.laws[0]).expand(-1, beam.last, -1)], 1)
        q = q.gather(1, origin[..., None].expand(-1, -1, q.shape[2]))
        numbers = origin * (origin < growth.num_expanded)  # every level but the last was expanded, in this order
        return Draft(tree, self.draws, q), numbers


class _Beam:
    """The paths so far. The nodes of the last level are still open."""

    def __init__(self, growth: DraftGrowth, widths: list[int]) -> None:
        self.context = growth.context
        self.tokens = torch.tensor(growth.context.roots, device=growth.context.device)[:, None]
        self.parents = torch.full_like(self.tokens, -1)
        self.kept = torch.ones_like(self.tokens, dtype=torch.bool)
        self.last = 1
        """Number of nodes of the last level."""
        self.laws: list[Tensor] = []
        self.law = growth.root()
        self._widths = torch.tensor(widths, device=self.tokens.device)[:, None]
        self._width = max(widths)
        self._phi = self._score = torch.zeros_like(self.tokens, dtype=torch.float64)

    def add(self, rows: list[bool]) -> None:
        """Add the next level of the named rows. The other rows get nodes that are not kept."""
        log_q, scores = _scores(
            self.law, self.context, self._phi, score=self._score, first_lane=len(self.parents[0]) - self.last
        )
        self.laws.append(self.law.probs)
        per_node = scores.topk(min(self._width, scores.shape[-1]), -1)
        best = per_node.values.flatten(1).topk(min(self._width, per_node.values[0].numel()), -1)
        places, tokens = best.indices // per_node.indices.shape[2], per_node.indices.flatten(1).gather(1, best.indices)
        ranks = torch.arange(best.values.shape[1], device=tokens.device).expand_as(tokens)
        kept = (best.values > -torch.inf) & (ranks < self._widths) & torch.tensor(rows, device=tokens.device)[:, None]
        order = places.argsort(dim=1, stable=True)  # breadth first; siblings stay in the order of their scores
        places, tokens, kept = (values.gather(1, order) for values in (places, tokens, kept))
        phi = self._phi.gather(1, places) + log_q.flatten(1).gather(1, places * log_q.shape[2] + tokens)
        self._phi = phi.masked_fill(~kept, -torch.inf)
        self._score = best.values.gather(1, order).masked_fill(~kept, -torch.inf)
        first = self.tokens.shape[1] - self.last
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, places + first], 1)
        self.kept = torch.cat([self.kept, kept], 1)
        self.last = tokens.shape[1]

    def expand(self, growth: DraftGrowth) -> None:
        """Expand every node of the last level. Expanded nodes keep their numbers."""
        self.law = growth.expand(self.tokens[:, -self.last :], self.parents[:, -self.last :])


def _scores(law: Law, context: Context, phi: Tensor, *, score: Tensor, first_lane: int) -> tuple[Tensor, Tensor]:
    """[B, M, V] log q and the perturbed scores of all children; -inf below dead nodes. At temperature 0 this is beam
    search."""
    num_rows, num_nodes, vocab_size = law.adjusted.shape
    temperature = torch.tensor([row.params.temperature for row in context.sampler.rows], device=phi.device)[:, None, None]
    log_q = torch.where(temperature > 0, law.logits, law.adjusted).double().log_softmax(-1)
    lanes = torch.arange(first_lane, first_lane + num_nodes, device=phi.device).expand(num_rows, -1)
    paths = phi[..., None] + log_q
    noisy = paths + context.noise.gumbel(Purpose.DRAFT, lanes, vocab_size)
    largest, given = noisy.amax(-1, keepdim=True), score[..., None]
    slack = given - noisy + torch.log1p(-torch.exp(noisy - largest))
    truncated = given - slack.clamp(min=0) - torch.log1p(torch.exp(-slack.abs()))
    scores = torch.where(temperature > 0, truncated, paths)
    return log_q, scores.masked_fill(~(paths > -torch.inf), -torch.inf)


def build(parts: Parts) -> Drafter:
    return StochasticBeam(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a draft model's stochastic beam, sampled without replacement along whole sequences",
    paper="Jeon et al. 2024, RSD-S (arXiv 2402.14160)",
    drafter=StochasticBeam,
    build=build,
    options=StochasticBeamOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
