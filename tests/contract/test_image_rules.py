"""Rules that forgive near codes: restated in plain loops, both forms equal, their law in closed form, their exact ends."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from test_lossy_rules import BareLaw, greedy_law, judged_rows
from test_rules_vectorised import VOCAB_SIZE, assert_forms_agree, case_of, random_law
from tiers import repeats
from tiny_heads import random_head
from tiny_pair import tiny_model
from torch import Tensor
from toy_laws import Experiment, by_draws, chain, distance, grow, toy_pair

from outrider.acceptance.delta import Delta
from outrider.acceptance.distance import enumerated_law, measure, one_guess_draft
from outrider.acceptance.gsd import Grouped, GroupedOptions, GroupedPartition, PartitionOptions
from outrider.acceptance.lantern import Lantern, LanternOptions, LanternPlus, LanternPlusOptions
from outrider.acceptance.neighbours import Neighbourhood
from outrider.acceptance.recursive import Recursive
from outrider.acceptance.rejection import Rejection
from outrider.acceptance.relaxed import RelaxedRule
from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.params import SamplingParams
from outrider.core.random_source import RandomSource
from outrider.core.request import Request
from outrider.core.rng import Noise
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import RULES as TABLE
from outrider.methods import compose

EXACT = 1e-12
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
CODES = torch.randn(VOCAB_SIZE, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
RULES: dict[str, RelaxedRule] = {
    "lantern": Lantern(LanternOptions(num_neighbours=2, lantern_delta=0.3, codebook=CODES)),
    "lantern-all": Lantern(LanternOptions(num_neighbours=99, lantern_delta=1.0)),
    "lantern++": LanternPlus(LanternPlusOptions(num_neighbours=3, lantern_lambda=3.0, codebook=CODES)),
    "gsd": Grouped(GroupedOptions(group_size=2, p_threshold=0.3, distance_threshold=4.0, codebook=CODES)),
    "gsd-wide": Grouped(GroupedOptions(group_size=99, p_threshold=2.0, distance_threshold=1e9)),
    "gsd-partition": GroupedPartition(PartitionOptions(num_groups=2, codebook=CODES)),
}
EXACT_ENDS: dict[str, RelaxedRule] = {
    "lantern": Lantern(LanternOptions(num_neighbours=0)),
    "lantern++": LanternPlus(LanternPlusOptions(num_neighbours=0)),
    "gsd": Grouped(GroupedOptions(group_size=0)),
    "gsd-partition": GroupedPartition(PartitionOptions(num_groups=VOCAB_SIZE)),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def pairs(seed: int, count: int = 40) -> tuple[Tensor, Tensor]:
    """[M, V] laws of target and draft: flat, cut, equal."""
    chance = random.Random(seed)
    kinds = [("full", "full"), ("full", "cut"), ("cut", "full")]
    p, q = (torch.cat([random_law(chance, 1, kind=kinds[i % 3][side]) for i in range(count)]) for side in (0, 1))
    q[::10] = p[::10]
    return p, q


# --- the rules, restated ----------------------------------------------------------------------------------------------


def lantern_law(p: list[float], q: list[float], rule: Lantern | LanternPlus) -> list[float]:
    """The first token's law by LANTERN's definition, in loops."""
    count, out = len(p), [0.0] * len(p)
    options = rule.options
    places = [[float(i)] for i in range(count)] if options.codebook is None else options.codebook.tolist()
    for x in range(count):
        others = sorted((v for v in range(count) if v != x), key=lambda v: (_far(places[x], places[v]), v))
        near = others[: options.num_neighbours]
        bound = options.lantern_delta if isinstance(options, LanternOptions) else (options.lantern_lambda - 1) * p[x]
        sums = [sum(p[v] for v in near[: j + 1]) for j in range(len(near))]
        allowed = [one for one in sums if one <= bound + 1e-15]
        raised = p[x] + max(allowed, default=0.0)
        keep = 0.0 if q[x] == 0 else min(1.0, raised / q[x])
        shadow = [0.0 if allowed and v in near else q[v] for v in range(count)]
        owed = [max(0.0, p[v] - shadow[v]) for v in range(count)]
        owed = owed if sum(owed) > 1e-12 else p
        for v in range(count):
            out[v] += q[x] * (1 - keep) * owed[v] / sum(owed)
        out[x] += q[x] * keep
    return out


def _far(a: list[float], b: list[float]) -> float:
    return sum((s - t) ** 2 for s, t in zip(a, b, strict=True))


def gsd_law(p: list[float], q: list[float], rule: Grouped) -> list[float]:
    """The first token's law with groups made around every guess, in loops."""
    count, options, kept = len(p), rule.options, [0.0] * len(p)
    places = [[float(i)] for i in range(count)] if options.codebook is None else options.codebook.tolist()
    order = sorted(range(count), key=lambda v: (p[v], v))
    for x in range(count):
        rank, half = order.index(x), options.group_size // 2
        around = order[max(0, rank - half) : rank + half + 1]
        group = [
            v
            for v in around
            if abs(p[v] - p[x]) < options.p_threshold and _far(places[v], places[x]) < options.distance_threshold
        ]
        mass = sum(q[v] for v in group)
        kept[x] = 0.0 if mass == 0 else q[x] * min(1.0, sum(p[v] for v in group) / mass)
    owed = [max(0.0, p[v] - q[v]) for v in range(count)]
    owed = owed if sum(owed) > 1e-12 else p
    return [kept[v] + (1 - sum(kept)) * owed[v] / sum(owed) for v in range(count)]


@pytest.mark.parametrize("name", ["lantern", "lantern-all", "lantern++", "gsd", "gsd-wide"])
def test_the_closed_form_is_the_definition(name: str) -> None:
    rule, (p, q) = RULES[name], pairs(1)
    found = rule.one_guess(p, q).law
    for number in range(len(p)):
        law = gsd_law if isinstance(rule, Grouped) else lantern_law
        expected = law(p[number].tolist(), q[number].tolist(), rule)  # type: ignore[arg-type]
        torch.testing.assert_close(found[number], torch.tensor(expected, dtype=torch.float64), atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_the_closed_form_is_the_enumerated_law(name: str) -> None:
    rule, (p, q) = RULES[name], pairs(2, 12)
    outcome = rule.one_guess(p, q)
    for number in range(len(p)):
        law = enumerated_law(rule, one_guess_draft(rule, p[number], q[number]))
        torch.testing.assert_close(outcome.law[number], law, atol=EXACT, rtol=0)
    loss = measure(rule, p, q)
    assert (loss.kept <= loss.exact_kept + loss.tv + EXACT).all(), "no rule gains more than it loses"
    assert (loss.kept >= loss.exact_kept - EXACT).all() and float(loss.tv.max()) > 0.01


def test_a_partition_keeps_the_law_of_groups() -> None:
    rule, (p, q) = RULES["gsd-partition"], pairs(3, 60)
    assert isinstance(rule, GroupedPartition)
    groups = rule.groups(VOCAB_SIZE, torch.device("cpu"))
    assert len(groups.unique()) == 2

    def of_groups(law: Tensor) -> Tensor:
        return torch.zeros(len(law), 2, dtype=law.dtype).index_add_(1, groups, law)

    outcome = rule.one_guess(p, q)
    torch.testing.assert_close(of_groups(outcome.law), of_groups(p), atol=EXACT, rtol=0)
    torch.testing.assert_close(outcome.kept, torch.minimum(of_groups(p), of_groups(q)).sum(-1), atol=EXACT, rtol=0)
    dynamic = RULES["gsd"].one_guess(p, q).law
    assert float((of_groups(dynamic) - of_groups(p)).abs().max()) > 0.01, "groups made anew do not keep it"


def test_delta_does_not_bound_the_loss() -> None:
    """A uniform target, and a draft that knows ten of its codes: everything is kept."""
    p, q = torch.full((1, 512), 1 / 512, dtype=torch.float64), torch.zeros(1, 512, dtype=torch.float64)
    q[0, 100:110] = 0.1
    loss = measure(Lantern(LanternOptions(num_neighbours=100, lantern_delta=0.1)), p, q)
    assert float(loss.kept) > 0.99 and float(loss.tv) > 0.95


# --- both forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_walk_is_walk_row(name: str, is_chain: bool) -> None:
    assert_forms_agree(RULES[name], cases=repeats(20, of=40), is_chain=is_chain)


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_temperature_0(name: str, is_chain: bool) -> None:
    """Greedy rows beside sampled ones. What is drawn is the argmax; what is kept may be another token."""
    rule, relaxed = RULES[name], 0
    for seed in range(20):
        case = case_of(seed, is_chain=is_chain)
        law = greedy_law(case, seed)
        for row, one, scalar in judged_rows(rule, case, law):
            if row % 2 == 0:
                nodes = [0, *scalar.path]
                assert scalar.next_token == int(law.adjusted[row, nodes[-1]].argmax())
                kept = zip(nodes, scalar.path, strict=False)
                relaxed += any(one.tokens[child] != int(law.adjusted[row, node].argmax()) for node, child in kept)
    assert bool(relaxed) is (name not in ("gsd", "gsd-wide")), "gsd leaves greedy text alone, the others do not"


@pytest.mark.parametrize("name", RULES)
def test_walk_stays_on_the_device(name: str) -> None:
    """Tensors without data: an operation that waits for a value raises."""
    if name == "gsd-partition":
        pytest.skip("its groups are made once, by counting")
    for is_chain in (True, False):
        case, meta = case_of(3, is_chain=is_chain), torch.device("meta")
        assert case.draft.q is not None
        probs = case.law.probs.to(meta)
        law: Any = BareLaw(probs, probs, probs)
        noise = Noise(case.noise.seeds.to(meta), case.noise.positions.to(meta))
        verdict = RULES[name].walk(Draft(case.tree.to(meta), Draws.IID, case.draft.q.to(meta)), law, noise)
        assert verdict.next_token.shape == (case.tree.batch_size,)


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("name", EXACT_ENDS)
def test_the_exact_end_is_recursive_rejection(name: str, is_chain: bool) -> None:
    """Rejection sampling on a chain; sibling by sibling on a tree."""
    exact = Rejection() if is_chain else Recursive()
    for seed in range(40):
        case = case_of(seed, is_chain=is_chain)
        mine, other = (rule.walk(case.draft, case.law, case.noise) for rule in (EXACT_ENDS[name], exact))
        if name != "gsd-partition":  # its residual is the same law, summed in another order
            assert mine.next_token.tolist() == other.next_token.tolist()
        assert mine.num_accepted.tolist() == other.num_accepted.tolist()
    pair, shape = toy_pair("random", 1, 2), chain(2) if is_chain else [-1, 0, 0, 1]
    experiment = Experiment(pair, grow(pair, shape, Draws.IID, by_draws(pair, Draws.IID)), 3)
    rule = GroupedPartition(PartitionOptions(num_groups=2)) if name == "gsd-partition" else EXACT_ENDS[name]
    assert distance(rule, experiment) < EXACT


def test_a_partition_keeps_the_law_of_groups_on_trees() -> None:
    """Two siblings: what the first leaves of a group is what the second is tested against."""
    rule = RULES["gsd-partition"]
    assert isinstance(rule, GroupedPartition)
    groups = rule.groups(VOCAB_SIZE, torch.device("cpu"))
    for p, q in zip(*pairs(5, 6), strict=True):

        def two_guesses(source: RandomSource, p: Tensor = p, q: Tensor = q) -> RowDraft:
            guesses = [source.categorical(q, lane) for lane in (100, 101)]
            return RowDraft([0, *guesses], [-1, 0, 0], p.expand(3, -1), q.expand(3, -1), Draws.IID)

        law = enumerated_law(rule, two_guesses)
        torch.testing.assert_close(law[groups == 0].sum(), p[groups == 0].sum(), atol=EXACT, rtol=0)


@pytest.mark.parametrize("acceptance", ["lantern", "lantern++", "gsd", "gsd-partition"])
def test_heads_grow_trees_for_them(acceptance: str) -> None:
    """A static tree of sampled guesses; at temperature 0 ``gsd`` leaves plain decoding's text alone."""
    target = tiny_model()
    options = {"heads": random_head("eagle3"), "branching": "3,2,1", "num_draft_tokens": 3}
    method = compose("eagle3", target, acceptance=acceptance, options=options)
    texts: list[list[int]] = []
    for one, params in product((method, compose("plain", target)), (SamplingParams(max_tokens=12), SAMPLED)):
        done = {step.request: step.state for step in run(Engine(target, one), [Request([1, 2, 3], params)], max_batch_size=1)}
        texts.append(done[0].output_ids)
    assert all(len(text) == 12 for text in texts)
    assert acceptance != "gsd" or texts[0] == texts[2]


# --- options and neighbours -------------------------------------------------------------------------------------------


def test_neighbours() -> None:
    line = Neighbourhood().nearest(2, 5, torch.device("cpu"))
    assert line.tolist() == [[1, 2], [0, 2], [1, 3], [2, 4], [3, 2]]
    codes = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    assert Neighbourhood(codes).nearest(9, 3, torch.device("cpu")).tolist() == [[2, 1], [0, 2], [0, 1]]
    assert Neighbourhood().groups(2, 6, torch.device("cpu")).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LanternOptions(lantern_delta=2), "lantern_delta = 2 is not valid"),
        (lambda: LanternOptions(num_neighbours=-1), "num_neighbours = -1 is not valid"),
        (lambda: LanternPlusOptions(lantern_lambda=0.5), "lantern_lambda = 0.5 is not valid"),
        (lambda: GroupedOptions(group_size=-2), "group_size = -2 is not valid"),
        (lambda: GroupedOptions(p_threshold=0), "p_threshold = 0 is not valid"),
        (lambda: PartitionOptions(num_groups=0), "num_groups = 0 is not valid"),
        (lambda: Neighbourhood(torch.zeros(3)), "one vector per token"),
        (lambda: Neighbourhood(torch.zeros(3, 2)).nearest(1, 4, torch.device("cpu")), "3 vectors and the vocabulary 4"),
    ],
)
def test_wrong_options(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


def test_the_table_says_that_they_are_lossy() -> None:
    for name in ("lantern", "lantern++", "gsd", "gsd-partition"):
        assert not TABLE[name].rule.lossless and TABLE[name].keeps == "neither seed nor law"
    assert Delta.lossless
