"""Traversal verification: the tree is judged from its leaves upwards, so a weak guess can be carried by those below it.

Every node has a *supply*, the probability with which something at or below it must be kept for the output to be exact; a leaf
is kept with its supply. A leaf that is dropped has used up part of its parent's law, as in recursive rejection. The rest gives
the parent a new supply and law. With these its next child is tried, and after the last child the parent itself, as a leaf. The
root is always kept. On a chain this is block verification, and at depth one recursive rejection. On average it keeps at least
as many guesses as recursive rejection.

    supply(root) = 1;   supply(child) = min(1, supply(u) p_u(x) / q_u(x))        when it is entered, in draw order
    leaf: keep it with probability supply(leaf), and say y ~ p_leaf
    else, for its parent u:   S = sum((supply p_u - q_u)+),   p_u <- norm((supply p_u - q_u)+),
                              supply(u) <- S / (S + 1 - supply(u)),   q_u <- norm(q_u without x), or q_u if independent

Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398. Lossless for siblings drawn without
replacement (or independent and merged), and for independent ones, if the shape of the tree does not depend on tokens in *other*
branches. The rule looks at the deeper nodes of one branch before it tries the next. So it refuses a stochastic beam, whose
branches compete for places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.paths import path_of, row_at, tree_verdict
from outrider.acceptance.residual import NOTHING, draw, draw_row, ratio, surplus
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict


@final
class Traversal(AcceptanceRule):
    """Keep the first leaf that passes, starting from the bottom."""

    exact_for: ClassVar = (Draws.WITHOUT_REPLACEMENT, Draws.IID)
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        end, rest = _search(row, source, 0, 1.0)
        assert end is not None, "the root is always kept"
        return RowVerdict(path_of(row, end), draw_row(rest, row.p[end], source), rejected=bool(row.children(end)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree = draft.tree
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        q = law.probs if draft.q is None else draft.q
        walk = _Walk.begin(tree, law.probs, q, noise)
        for nodes, entering in _events(tree):
            walk.visit(nodes, entering, with_replacement=draft.draws is Draws.IID)
        return tree_verdict(tree, walk.ends, draw(row_at(walk.p, walk.ends), row_at(law.probs, walk.ends), noise))


def _search(row: RowDraft, source: RandomSource, node: int, supply: float) -> tuple[int | None, Tensor]:
    """The node at or below ``node`` that is kept, or None, and the residual law there."""
    p = row.p[node]
    q = p if row.q is None else row.q[node]
    for child in row.children(node):
        guess = row.tokens[child]
        found, rest = _search(row, source, child, ratio(supply * float(p[guess]), float(q[guess])))
        if found is not None:
            return found, rest
        owed = surplus(supply * p, q)
        total = float(owed.sum())
        p = owed / total if total > NOTHING else p
        supply = total / (total + 1 - supply) if total + 1 - supply > 0 else 1.0
        if row.draws is not Draws.IID:
            left = q.index_fill(0, torch.tensor(guess), 0.0)
            q = left / left.sum() if left.sum() > 0 else left
    kept = node == 0 or source.bernoulli(supply, node)
    return (node if kept else None), p


@dataclass(eq=False)
class _Walk:
    """The same search in every row at once: the residuals of p and q at each node, and where each row has ended."""

    tree: TokenTree
    p: Tensor
    q: Tensor
    supply: Tensor
    coins: Tensor
    ends: Tensor
    """[B] 0 while the row is still searching; a row that keeps nothing else ends at the root."""

    @staticmethod
    def begin(tree: TokenTree, p: Tensor, q: Tensor, noise: Noise) -> _Walk:
        lanes = torch.arange(tree.num_nodes, device=p.device).expand(tree.batch_size, -1)
        coins = noise.uniform(Purpose.ACCEPT, lanes)
        supply = torch.ones_like(p[..., 0])
        return _Walk(tree, p.clone(), q.clone(), supply, coins, torch.zeros_like(tree.tokens[:, 0]))

    def visit(self, nodes: Tensor, entering: Tensor, *, with_replacement: bool) -> None:
        """One event per row: ``nodes`` [B] is entered, or left when all below it is gone. The root's events do nothing."""
        at, searching = nodes[:, None], (self.ends == 0) & (nodes > 0)
        above = self.tree.parents.gather(1, at).clamp(min=0)
        guess = self.tree.tokens.gather(1, at)
        p, q, given = row_at(self.p, above[:, 0]), row_at(self.q, above[:, 0]), self.supply.gather(1, above)
        scaled, drawn = given * p.gather(1, guess), q.gather(1, guess)
        fresh = torch.where(scaled < drawn, scaled / drawn, (scaled > 0).to(p.dtype))
        supply = torch.where(entering[:, None], fresh, self.supply.gather(1, at))
        self.supply = self.supply.scatter(1, at, supply)
        kept = searching & ~entering & (self.coins.gather(1, at) < supply)[:, 0]
        self.ends = torch.where(kept, nodes, self.ends)
        dropped = (searching & ~entering & ~kept)[:, None]
        owed = surplus(given * p, q)
        total = owed.sum(-1, keepdim=True)
        missing = total + 1 - given
        self._replace(self.p, above, torch.where(dropped & (total > NOTHING), owed / total, p))
        less = torch.where(dropped, torch.where(missing > 0, total / missing, 1.0), given)
        self.supply = self.supply.scatter(1, above, less)
        if not with_replacement:
            left = q.scatter(1, guess, 0.0)
            rest = left.sum(-1, keepdim=True)
            self._replace(self.q, above, torch.where(dropped, torch.where(rest > 0, left / rest, left), q))

    def _replace(self, laws: Tensor, nodes: Tensor, rows: Tensor) -> None:
        laws.scatter_(1, nodes[..., None].expand(-1, 1, laws.shape[2]), rows[:, None])


def _events(tree: TokenTree) -> list[tuple[Tensor, Tensor]]:
    """The steps of a depth-first visit, siblings in order: at each step the node of each row, and whether it is entered or
    left.

    Step numbers are counted from the tree's shape, so that nothing waits for the device. Before a node is entered, its
    ancestors were entered, and everything below its and their elder siblings was entered and left. Padding is visited as the
    root, which does nothing.
    """
    ancestors, parents = tree.ancestors, tree.parents
    ancestors = ancestors & tree.valid[:, :, None]
    elder = (parents[:, :, None] == parents[:, None]).tril(-1) & tree.valid[:, None]
    weight = ancestors.sum(1).to(torch.float64)  # nodes at or below each node
    before = 1 + 2 * (elder * weight[:, None]).sum(-1)
    before[:, 0] = 0
    entered = (ancestors * before[:, None]).sum(-1).long()
    left = entered + 2 * weight.long() - 1
    num_events = 2 * tree.num_nodes
    nodes = torch.arange(tree.num_nodes, device=parents.device).expand_as(parents)
    spare = torch.full_like(parents, num_events)  # padding goes to a slot that is not read
    order = torch.zeros(tree.batch_size, num_events + 1, dtype=torch.int64, device=parents.device)
    order = order.scatter(1, torch.where(tree.valid, entered, spare), nodes).scatter(
        1, torch.where(tree.valid, left, spare), nodes
    )
    entering = torch.zeros_like(order, dtype=torch.bool)
    entering = entering.scatter(1, torch.where(tree.valid, entered, spare), tree.valid)
    return [(order[:, step], entering[:, step]) for step in range(num_events)]
