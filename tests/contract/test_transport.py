"""The transport rule accepts what the linear program of k independent guesses allows. (Its exactness: test_rules_exact.)"""

from __future__ import annotations

import itertools
import math

import networkx
import pytest
import torch
from test_tree_rules import THREE, TWO, means
from toy_laws import FLAVOURS, Experiment, Pair, RowRule, chain, distance, grow, sampled, toy_pair

from outrider.acceptance import KSeq, Recursive, Rejection, Transport
from outrider.acceptance import transport as transport_file
from outrider.core.draft import Draft, Draws
from outrider.core.rng import Noise
from outrider.core.tree import TokenTree

pytestmark = pytest.mark.usefixtures("remembered_plans")
ROUNDING = 1e-9
IID = Draws.IID


def best_by_program(pair: Pair, count: int) -> float:
    """The linear program, as a flow: every tuple of draws sends its probability to the tokens in it, a token takes p."""
    p, q = pair.p(()).tolist(), pair.q(()).tolist()
    graph = networkx.DiGraph()
    graph.add_edges_from(("source", draws, {"capacity": math.prod(q[v] for v in draws)}) for draws in tuples(pair, count))
    graph.add_edges_from((draws, v) for draws in tuples(pair, count) for v in set(draws))
    graph.add_edges_from((v, "sink", {"capacity": p[v]}) for v in range(pair.vocab_size))
    return networkx.maximum_flow_value(graph, "source", "sink")


def tuples(pair: Pair, count: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(pair.vocab_size), repeat=count))


def best_by_cuts(p: torch.Tensor, q: torch.Tensor, count: int) -> float:
    """The dual: the least of 1 + p(H) - q(H)^k over all sets of tokens H."""
    members = (torch.arange(2 ** len(p))[:, None] >> torch.arange(len(p)) & 1).double()
    return 1 + float((members @ p - (members @ q) ** count).min())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("shape", "count"), [(TWO, 2), (THREE, 3)], ids=["two", "three"])
def test_it_accepts_the_optimum_of_the_program(flavour: str, shape: list[int], count: int) -> None:
    for seed in range(3 if count == 2 else 1):
        pair = toy_pair(flavour, seed, 3)
        accepted = means(pair, shape, IID, Transport)[0] - 1
        assert accepted == pytest.approx(best_by_program(pair, count), abs=ROUNDING)
        assert accepted == pytest.approx(best_by_cuts(pair.p(()), pair.q(()), count), abs=ROUNDING)


def test_it_never_accepts_less_than_other_rules_for_independent_guesses() -> None:
    over_kseq, over_recursive = [], []
    for seed in range(8):
        pair = toy_pair("random", seed, 3)
        for shape in (TWO, THREE) if seed < 2 else (TWO,):
            transport, kseq, recursive = means(pair, shape, IID, Transport, KSeq, Recursive)
            over_kseq.append(transport - kseq)
            over_recursive.append(transport - recursive)
    assert min(over_kseq) > -1e-6  # k-SEQ's factor comes from a bisection
    assert min(over_recursive) > -ROUNDING
    assert max(over_kseq) > 0.01 and max(over_recursive) > 0.01


def test_on_a_chain_it_is_rejection() -> None:
    for seed in range(6):
        transport, rejection = means(toy_pair("random", seed, 3), chain(2), IID, Transport, Rejection)
        assert transport == pytest.approx(rejection)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_plan_of_many_tokens_is_optimal_and_valid(count: int) -> None:
    """The plan alone: what wins is a law, the moves give back every place what was taken, and the optimum is reached."""
    chance = torch.Generator().manual_seed(count)
    for number in range(20):
        p, q = (torch.rand(12, generator=chance, dtype=torch.float64).pow(4) for _ in range(2))
        q[: number % 4] = 0  # tokens that are never guessed
        p[2 : 2 + number % 3] = 0  # tokens that are never right
        p, q = p / p.sum(), q / q.sum()
        plan = transport_file._Plan.of(p, q, torch.tensor(count))
        assert float(plan.wins.sum()) == pytest.approx(1, abs=ROUNDING)
        assert float(torch.minimum(p, plan.wins).sum()) == pytest.approx(best_by_cuts(p, q, count), abs=ROUNDING)
        moves = torch.stack([plan.moves(torch.tensor([token])) for token in range(12)])
        assert float(moves.max()) < 1 + ROUNDING
        kernel = moves.diff(dim=1, prepend=torch.zeros(12, 1, dtype=torch.float64))
        kernel[torch.arange(12), plan.rank] += 1 - moves[:, -1]
        torch.testing.assert_close(q @ kernel, plan.mass, atol=ROUNDING, rtol=0)  # every place is taken as often as before
        torch.testing.assert_close(q * (kernel @ plan.worth), plan.wins, atol=ROUNDING, rtol=0)


def test_the_batched_form_accepts_the_optimum_of_a_larger_vocabulary() -> None:
    """2000 tokens in float32, most of them nearly impossible: the share of accepted rounds is the optimum's."""
    chance, size, rounds = torch.Generator().manual_seed(0), 2000, 40
    p = (4 * torch.randn(size, generator=chance)).softmax(0)
    q = (p.log() + 1.5 * torch.randn(size, generator=chance)).softmax(0)
    plan = transport_file._Plan.of(p, q, torch.tensor(3))
    best = float(torch.minimum(plan.p, plan.wins).sum())
    assert float(plan.wins.sum()) == pytest.approx(1, abs=ROUNDING)
    accepted = 0
    for start in range(0, rounds * 8, 8):
        tokens = torch.cat([torch.zeros(8, 1), torch.multinomial(q.expand(8, -1), 3, replacement=True, generator=chance)], 1)
        tree = TokenTree.of_rows([(row, THREE) for row in tokens.long().tolist()])
        noise = Noise(torch.arange(start, start + 8), torch.zeros(8, dtype=torch.int64))
        verdict = Transport().walk(Draft(tree, IID, q.expand(8, 4, -1)), OnlyProbs(p.expand(8, 4, -1)), noise)  # type: ignore[arg-type]
        accepted += int(verdict.num_accepted.sum())
    error = math.sqrt(best * (1 - best) / (rounds * 8))
    assert abs(accepted / (rounds * 8) - best) < 4 * error


class OnlyProbs:
    """What this rule reads of a law."""

    def __init__(self, probs: torch.Tensor) -> None:
        self.probs = probs


# --- how to get it wrong ----------------------------------------------------------------------------------------------


def biased(rule: RowRule, shape: list[int] = TWO) -> float:
    """The largest distance from the target's law over a few random pairs."""
    pairs = [toy_pair("random", seed, 3) for seed in range(6)]
    return max(distance(rule, Experiment(pair, grow(pair, shape, IID, sampled(pair)), 2)) for pair in pairs)


def test_the_check_notices_a_plan_for_another_number_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transport_file._Plan.of
    monkeypatch.setattr(transport_file._Plan, "of", staticmethod(lambda p, q, count: right(p, q, count + 1)))
    assert biased(Transport()) > 1e-3


def test_the_check_notices_places_that_are_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_file, "_place_row", lambda plan, token, node, source: int(plan.rank[token]))
    assert biased(Transport()) > 1e-3


def test_the_check_notices_moves_in_one_direction_only(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transport_file._overlap

    def one_way(mine: torch.Tensor, theirs: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        found = right(mine, theirs, own)
        return found * (torch.arange(found.shape[-1]) > own)

    monkeypatch.setattr(transport_file, "_overlap", one_way)
    assert biased(Transport()) > 1e-3
