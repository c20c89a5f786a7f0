"""One row of a batch of drafts, as a scalar acceptance rule reads it in a paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.sampling import Law


@dataclass(frozen=True, eq=False)
class RowDraft:
    """One row's tree with its laws."""

    tokens: list[int]
    parents: list[int]
    p: Tensor
    """[N, V] the target's law after each node, float64."""
    q: Tensor | None
    """[N, V] the law from which each node's children were drawn; [N, S, V] if drafters take turns."""
    draws: Draws

    def children(self, node: int) -> list[int]:
        """Children in the order they were drawn."""
        return [child for child in range(1, len(self.tokens)) if self.parents[child] == node]

    def depth(self, node: int) -> int:
        depth = 0
        while node > 0:
            node = self.parents[node]
            depth += 1
        return depth

    @staticmethod
    def of(draft: Draft, law: Law, row: int) -> RowDraft:
        """Row ``row`` of a batched draft and its target law."""
        size = draft.tree.sizes[row]
        tokens, parents = draft.tree.tokens[row, :size].tolist(), draft.tree.parents[row, :size].tolist()
        q = None if draft.q is None else draft.q[row, :size].double().cpu()
        return RowDraft(tokens, parents, law.probs[row, :size].double().cpu(), q, draft.draws)
