"""A chain with side branches: every guess of a self-drafted chain has the next best candidates as siblings, which are leaves.

The law that makes a guess also ranks the other candidates, so siblings cost no drafting, only nodes in the verifying pass. If a
guess is wrong, one of its siblings is often right, and the round ends one token later. The less sure a guess, the more siblings
it gets. (SWIFT's candidate tree: Xia et al. 2024, arXiv 2410.06916.)

    chance > 0.95: 3 candidates,   > 0.8: 5,   > 0.5: 8,   otherwise 10;      the best of them goes on

Candidates are the top of T (log q + g) with the target's noise g: chosen, so lossless under ``coupled`` and ``delta``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Context, Plan
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.drafters.itself.self_chain import cache_of
from outrider.drafters.trees.candidates import coupled_scores

_WIDTHS = ((0.95, 3), (0.8, 5), (0.5, 8), (-1.0, 10))
"""Number of candidates, by the confidence in the best one."""


@final
@dataclass
class _Row:
    """One row's growing tree, and the rest of its plan."""

    tokens: list[int]
    depth: int
    budget: int
    parents: list[int] = field(default_factory=lambda: [-1])
    tip: int = 0
    """The node that continues the chain."""

    @property
    def goes_on(self) -> bool:
        return self.depth > 0 and self.budget > 0

    def add(self, candidates: list[int], sure: float) -> None:
        """Add a level: the best candidate, and more of the others the lower its confidence."""
        width = min(self.budget, next(width for bound, width in _WIDTHS if sure > bound))
        first = len(self.tokens)
        self.tokens += candidates[:width]
        self.parents += [self.tip] * len(candidates[:width])
        self.tip, self.depth, self.budget = first, self.depth - 1, self.budget - width


def draft_with_siblings(target: LayeredTarget, context: Context, plan: Plan, *, route: Route, threshold: float = 0.0) -> Draft:
    """A tree per row from the sublayers of ``route``. A row ends below a guess with less confidence than ``threshold``."""
    cache, limits = cache_of(context), zip(context.roots, plan.max_depth, plan.max_nodes, strict=True)
    rows = [_Row([root], depth, nodes) for root, depth, nodes in limits]
    chain, depth = torch.tensor(context.roots, device=context.device)[:, None], 0
    while any(row.goes_on for row in rows):
        so_far = TokenTree.chain(chain)
        hidden = target.exit(so_far, cache, route=route, start=depth)
        law = context.sampler.law(target.logits(hidden), so_far, context.noise, start=depth)
        asked = plan.stop.before(depth, law) if plan.stop is not None else None
        scores = coupled_scores(law, context, depth=depth)[:, -1]
        best = scores.topk(min(_WIDTHS[-1][1], scores.shape[-1]))
        sure = (best.values[:, 0] - scores.logsumexp(-1)).exp().tolist()
        chain = torch.cat([chain, best.indices[:, :1]], 1)
        more = plan.stop.after(depth, law, chain[:, -1]) if plan.stop is not None else None
        for i, (row, candidates) in enumerate(zip(rows, best.indices.tolist(), strict=True)):
            if not row.goes_on or (asked is not None and not asked[i]):
                row.depth = 0
                continue
            row.add(candidates, sure[i])
            if sure[i] < threshold or (more is not None and not more[i]):
                row.depth = 0
        depth += 1
    tree = TokenTree.of_rows([(row.tokens, row.parents) for row in rows], context.device)
    return Draft(tree, Draws.DETERMINISTIC)
