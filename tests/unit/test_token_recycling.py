"""Token recycling against slow plain-Python oracles: the trees of ranks, the table, the order of writes, the drafted trees."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Observation, Plan, Target
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.itself.successors import SuccessorTable
from outrider.drafters.itself.token_recycling import RANK_ACCEPTANCE, TokenRecycling, TokenRecyclingOptions
from outrider.drafters.trees.shape import TreeShape

VOCAB, K = 23, 4
CPU = torch.device("cpu")
Path = tuple[int, ...]


class Head(Target):
    """A target of which only the head is ever used."""

    vocab_size, max_len, num_layers, device, dtype = VOCAB, 99, 2, CPU, torch.float32

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 5, generator=torch.Generator().manual_seed(3))

    def new_cache(self, batch_size):
        raise NotImplementedError

    def prefill(self, rows, cache, *, taps=()):
        raise NotImplementedError

    def score(self, tree, cache, *, taps=(), start=0, resume=None):
        raise NotImplementedError

    def logits(self, hidden):
        return hidden @ self.weight.T


def random_table(seed: int = 0, *, num_cold: int = 5) -> SuccessorTable:
    """Random successors for all tokens but the first ``num_cold``."""
    table = SuccessorTable(VOCAB, K)
    logits = 2 * torch.randn(VOCAB - num_cold, VOCAB, generator=torch.Generator().manual_seed(seed))
    table.write(torch.arange(num_cold, VOCAB), logits)
    return table


def context_of(roots: list[int], temperatures: list[float] | None = None) -> Context:
    heat = temperatures or [0.0] * len(roots)
    rows = [RequestState.of(Request([1, root], SamplingParams(temperature=t, seed=5))) for root, t in zip(roots, heat)]
    noise = Noise(torch.tensor([row.seed for row in rows]), torch.arange(len(rows)))
    return Context([row.tokens for row in rows], Sampler(rows, VOCAB, CPU), noise, CPU)


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """Token paths of a row's guesses, after checking that the tree is in order."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    depths = tree.depths[row].tolist()[: tree.sizes[row]]
    assert depths == sorted(depths) and parents[0] == -1
    assert all(parents[node] < node for node in range(1, tree.sizes[row]))
    paths = [tuple(tokens[n] for n in tree.path(row, node)) for node in range(1, tree.sizes[row])]
    assert len(set(paths)) == len(paths), "no duplicate siblings"
    return paths


# --- trees of ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 3), (4, 1), (7, 2), (12, 4), (30, 3), (50, 2)])
def test_the_grown_tree_has_the_largest_values(num_nodes: int, max_depth: int) -> None:
    acceptance = (0.47, 0.2, 0.11, 0.05)
    every = [path for depth in range(1, max_depth + 1) for path in itertools.product(range(4), repeat=depth)]
    best = sorted(every, key=lambda path: -math.prod(acceptance[rank] for rank in path))[:num_nodes]
    grown = TreeShape.of_acceptance(acceptance, num_nodes, max_depth).paths[1:]
    assert sum(math.prod(acceptance[r] for r in path) for path in grown) == pytest.approx(
        sum(math.prod(acceptance[r] for r in path) for path in best)
    )
    assert len(set(grown)) == len(grown) == min(num_nodes, len(every))
    assert all(path[:-1] in grown for path in grown if len(path) > 1)


def test_a_smaller_tree_is_part_of_a_larger_one() -> None:
    largest = set(TreeShape.of_acceptance(RANK_ACCEPTANCE, 80, 8).paths)
    for size in (1, 8, 16, 32, 64):
        smaller = TreeShape.of_acceptance(RANK_ACCEPTANCE, size, 8)
        assert smaller.num_nodes == size and set(smaller.paths) < largest
    for nodes, depth in ((0, 8), (8, 0)):
        assert TreeShape.of_acceptance(RANK_ACCEPTANCE, nodes, depth).paths == ((),)


def test_levels_of_a_shape_are_its_depths() -> None:
    for nodes, depth in ((0, 3), (5, 1), (12, 2), (5, 4), (60, 8)):
        shape = TreeShape.of_acceptance(RANK_ACCEPTANCE, nodes, depth)
        found = [[len(shape.paths[node]) for node in level] for level in shape.levels]
        assert found == [[depth] * len(level) for depth, level in enumerate(shape.levels)]
        assert sum(map(len, shape.levels)) == nodes + 1 and max(map(max, found)) == shape.max_depth


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_keeps_the_last_write_of_a_token() -> None:
    generator = torch.Generator().manual_seed(1)
    table, oracle = SuccessorTable(VOCAB, K), dict[int, list[int]]()
    for _ in range(5):
        tokens, logits = torch.randint(8, (30,), generator=generator), torch.randn(30, VOCAB, generator=generator)
        order = torch.randperm(30, generator=generator)[:20]
        table.write(tokens, logits, order=order)
        for entry in order.tolist():
            oracle[int(tokens[entry])] = sorted(range(VOCAB), key=lambda v: -float(logits[entry, v]))[:K]
    for token in range(VOCAB):
        assert table.ids[token].tolist() == oracle.get(token, [-1] * K)
    assert table.num_known == len(oracle)
    table.clear()
    assert table.num_known == 0


def test_every_node_is_recycled_and_the_best_witness_counts() -> None:
    """Accepted nodes beat others, then later nodes, then later rows; padding is nobody's opinion."""
    tree = TokenTree.of_rows([([5, 7, 7, 9, 7, 5], [-1, 0, 0, 1, 2, 3]), ([5, 9, 8], [-1, 0, 1])])
    logits = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(2))
    drafter = TokenRecycling(Head(), SuccessorTable(VOCAB, K))
    paths = [[0, 2], [0]]
    seen = Observation(Draft(tree, Draws.DETERMINISTIC), Scores(logits), paths, [1, 0], 0.0, 0.0)
    drafter.observe(drafter.start([], {2: []}), seen)
    # Token 5 stands at both roots and below; the roots are accepted, and row 1 comes later. Token 7 was accepted at node 2.
    winners = {5: (1, 0), 7: (0, 2), 9: (0, 3), 8: (1, 2)}
    for token in range(VOCAB):
        expected = logits[winners[token]].topk(K).indices.tolist() if token in winners else [-1] * K
        assert drafter.table.ids[token].tolist() == expected, token


def test_the_prompt_is_recycled_at_the_last_occurrence_of_each_token() -> None:
    drafter, row = TokenRecycling(Head(), SuccessorTable(VOCAB, K)), [3, 4, 3, 6, 4, 9]
    hidden = torch.randn(5, 5, generator=torch.Generator().manual_seed(4))
    drafter.start([row, [2]], {2: [hidden, torch.zeros(0, 5)]})
    logits = drafter.target.logits(hidden)
    for token, position in ((3, 2), (6, 3), (4, 4)):
        assert drafter.table.ids[token].tolist() == logits[position].topk(K).indices.tolist()
    assert drafter.table.num_known == 3
    silent = TokenRecycling(Head(), SuccessorTable(VOCAB, K), TokenRecyclingOptions(recycle_prompt=False))
    silent.start([row], {})
    assert silent.taps == () and silent.table.num_known == 0


# --- drafted trees ----------------------------------------------------------------------------------------------------

PLANS = [Plan((4, 4, 4, 4), (9, 9, 9, 9)), Plan((2, 0, 3, 9), (7, 5, 1, 14)), Plan((1, 2, 1, 1), (1, 2, 1, 0))]
ROOTS = [7, 20, 2, 11]  # token 2 is cold


def ranked(table: SuccessorTable, context: Context, row: int, path: Path) -> list[tuple[int, float]]:
    """Oracle: successors of a path's last token with their scores, best first; empty where the table is cold."""
    if table.ids[path[-1], 0] < 0:
        return []
    heat = context.sampler.rows[row].params.temperature
    noise = context.noise.target_gumbel(torch.full((4, 1), len(path) - 1), VOCAB)[row, 0].tolist()
    pairs = zip(table.ids[path[-1]].tolist(), table.logits[path[-1]].tolist(), strict=True)
    return sorted(((token, score + heat * noise[token]) for token, score in pairs), key=lambda pair: -pair[1])


def by_ranks(table: SuccessorTable, context: Context, row: int, plan: Plan) -> set[Path]:
    found: dict[Path, Path] = {(): (context.roots[row],)}
    for ranks in TreeShape.of_acceptance(RANK_ACCEPTANCE[:K], plan.max_nodes[row], plan.max_depth[row]).paths[1:]:
        above = found.get(ranks[:-1])
        children = ranked(table, context, row, above) if above else []
        if above and children:
            found[ranks] = (*above, children[ranks[-1]][0])
    return {path[1:] for path in found.values()} - {()}


def by_confidence(table: SuccessorTable, context: Context, row: int, plan: Plan) -> set[Path]:
    grown: set[Path] = set()
    heap: list[tuple[float, Path]] = [(-1.0, (context.roots[row],))]
    while heap and len(grown) <= plan.max_nodes[row]:
        value, path = heapq.heappop(heap)
        grown.add(path[1:])
        children = ranked(table, context, row, path) if len(path) <= plan.max_depth[row] else []
        total = sum(math.exp(score) for _, score in children)
        for rank, (token, score) in enumerate(children):
            heapq.heappush(heap, (value * (0.65 * math.exp(score) / total + 0.04 / (1 + rank)), (*path, token)))
    return grown - {()}


@pytest.mark.parametrize("heat", [[0.0] * 4, [0.0, 1.0, 0.7, 1.3]], ids=["greedy", "mixed"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("way", "oracle", "few"), [("ranks", by_ranks, 64), ("confidence", by_confidence, 64), ("confidence", by_confidence, 0)]
)
def test_trees_are_those_of_the_oracle(
    way: str, oracle, few: int, plan: Plan, heat: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of ranks, and of confidence node by node and level by level."""
    monkeypatch.setattr("outrider.drafters.itself.token_recycling._FEW", few)
    table, context = random_table(), context_of(ROOTS, heat)
    drafter = TokenRecycling(Head(), table, TokenRecyclingOptions(num_successors=K, grow=way))
    tree = drafter.propose(drafter.start([], {2: []}), context, plan).tree
    assert tree.tokens[:, 0].tolist() == ROOTS
    for row in range(4):
        paths = paths_of(tree, row)
        assert set(paths) == oracle(table, context, row, plan)
        assert len(paths) <= plan.max_nodes[row] and all(len(path) <= plan.max_depth[row] for path in paths)
        assert all(not path[:-1] or table.ids[path[-2], 0] >= 0 for path in paths), "nothing is drafted from a cold row"
    assert tree.sizes[2] == 1


def test_perturbed_siblings_begin_with_the_token_the_noise_favours() -> None:
    table, context = random_table(num_cold=0), context_of([7], [1.0])
    noise = context.noise.target_gumbel(torch.zeros(1, 1, dtype=torch.int64), VOCAB)[0, 0]
    for perturb in (True, False):
        options = TokenRecyclingOptions(num_successors=K, grow="ranks", perturb=perturb)
        tree = TokenRecycling(Head(), table, options).propose(None, context, Plan((1,), (K,))).tree  # type: ignore[arg-type]
        score = table.logits[7] + (noise[table.ids[7]] if perturb else 0)
        assert tree.tokens[0, 1:].tolist() == table.ids[7][score.argsort(descending=True)].tolist()


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="num_successors = 0"):
        TokenRecyclingOptions(num_successors=0)
    with pytest.raises(OptionError, match="did you mean 'ranks'"):
        TokenRecyclingOptions(grow="rank")
