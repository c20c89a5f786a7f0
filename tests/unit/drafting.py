"""What tests of drafters share: propose for given histories without a target, and check what every tree must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.core.draft import Draft
from outrider.core.interfaces import Context, Drafter, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler

Tree = tuple[list[int], list[int]]


def propose(
    drafter: Drafter, state: Any, histories: Sequence[list[int]], depths: Sequence[int], nodes: Sequence[int]
) -> list[Tree]:
    """Tokens and parents of each row, checked against the plan."""
    cpu, size = torch.device("cpu"), len(histories)
    rows = [RequestState.of(Request(history, SamplingParams())) for history in histories]
    noise = Noise(torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
    context = Context(histories, Sampler(rows, 1000, cpu), noise, cpu)
    plan = Plan(tuple(depths), tuple(nodes))
    draft = drafter.propose(state, context, plan)
    assert draft.draws in drafter.offers and draft.q is None
    return check(draft, histories, plan)


def check(draft: Draft, histories: Sequence[Sequence[int]], plan: Plan) -> list[Tree]:
    """Roots, breadth-first order, distinct siblings, and the plan's limits."""
    trees: list[Tree] = []
    for row, history in enumerate(histories):
        size = draft.tree.sizes[row]
        tokens, parents = draft.tree.tokens[row, :size].tolist(), draft.tree.parents[row, :size].tolist()
        depths = [0]
        for node in range(1, size):
            assert 0 <= parents[node] < node
            depths.append(depths[parents[node]] + 1)
        assert tokens[0] == history[-1] and parents[0] == -1
        assert parents[1:] == sorted(parents[1:]), "breadth-first: parents in order"
        assert len({(parents[node], tokens[node]) for node in range(1, size)}) == size - 1, "siblings differ"
        assert max(depths) <= plan.max_depth[row] and size - 1 <= plan.max_nodes[row]
        trees.append((tokens, parents))
    return trees


def start(drafter: Drafter, histories: Sequence[list[int]]) -> Any:
    return drafter.start(histories, {})
