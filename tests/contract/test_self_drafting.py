"""Targets that draft for themselves: the text of plain decoding, right caches, honest laws, and guesses as good as can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting import check
from fresh_prefill import assert_always_fresh
from markov import Markov
from test_methods import EVERYTHING, SAMPLED
from thinned import LAYERS, VOCAB, thinned_model
from tiers import in_turn

from outrider.core.draft import Draft, Draws
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Plan
from outrider.core.layered_target import LayeredTarget
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.route import Route
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.itself.del_ import DynamicExit
from outrider.drafters.itself.exit_statistics import ExitStatistics
from outrider.drafters.itself.swift import Swift, SwiftTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose

EOS = frozenset({VOCAB - 1})
PROMPTS = [[random.Random(i).randrange(VOCAB - 1) for _ in range(1 + 3 * i % 17)] for i in range(6)]
PARAMS = {"greedy": SamplingParams(max_tokens=12), "sampled": SAMPLED, "everything": EVERYTHING}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "exit 1": ("early-exit", {"exit_layer": 1}),
    "exit 5": ("early-exit", {"exit_layer": 5, "num_draft_tokens": 7}),
    "tree": ("early-exit", {"exit_layer": 3, "branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}),
    "tree, cut": ("early-exit", {"exit_layer": 4, "branching": "4,2,2", "num_draft_tokens": 3, "num_tree_nodes": 9}),
    "kangaroo": ("kangaroo", {"threshold": 0.5}),
    "kangaroo, patient": ("kangaroo", {"exit_layer": 5, "threshold": 0.1, "num_draft_tokens": 9}),
    "draft-verify": ("draft-verify", {"threshold": 0.4}),
    "draft-verify, both": ("draft-verify", {"skip_attention": "1,2", "skip_mlp": (4,), "threshold": 0.3}),
    "swift": ("swift", {"window": 6, "threshold": 0.3, "max_trials": 40}),
    "swift, unsearched": ("swift", {"max_trials": 0, "threshold": 0.3}),
    "swift, branches": ("swift", {"window": 6, "threshold": 0.2, "branches": True, "num_tree_nodes": 20, "max_trials": 9}),
    "del": ("del", {"look_every": 2, "num_draft_tokens": 6}),
    "del, exact lengths": ("del", {"look_every": 1, "exits": "1,3,5", "dynamic": False, "num_draft_tokens": 4}),
    "specee": ("specee", {"threshold": 0.4}),
    "specee, few asked": ("specee", {"exits": "1,3,4,5", "threshold": 0.3, "recent": 2, "reach": 0, "num_draft_tokens": 9}),
}


@pytest.fixture(scope="module")
def target() -> LayeredTarget:
    return thinned_model(strength=0.35)


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[list[int]]]:
    return {name: tokens(serve(target, compose("plain", target), params)) for name, params in PARAMS.items()}


def method_of(name: str, target: LayeredTarget, **more: Any) -> Method:
    row, options = CASES[name]
    return compose(row, target, options=options, **more)


def serve(
    target: LayeredTarget, method: Method, params, prompts=PROMPTS, *, batch: int = 1, sizes: list[int] | None = None
) -> list[RequestState]:
    done: dict[int, RequestState] = {}
    engine = Engine(target, method)
    for step in run(engine, [Request(prompt, params, EOS) for prompt in prompts], max_batch_size=batch):
        if sizes is not None:
            sizes.append(len(step.trace.tokens))
        if step.state.is_finished:
            done[step.request] = step.state
    return [done[i] for i in range(len(prompts))]


def tokens(states: Sequence[RequestState]) -> list[list[int]]:
    return [state.output_ids for state in states]


def rate(states: Sequence[RequestState]) -> float:
    """Tokens per pass."""
    return sum(s.stats.num_tokens for s in states) / sum(s.stats.num_passes for s in states)


def tiered(turns: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Every name with one of ``turns``, which take turns. The other pairs are left to ``make test-all``."""
    pairs = [(name, turn, place % len(turns) == turns.index(turn)) for place, name in enumerate(names) for turn in turns]
    return [pytest.param(name, turn, marks=() if usual else pytest.mark.exhaustive) for name, turn, usual in pairs]


@pytest.mark.parametrize(
    ("name", "params"), [*itertools.product(CASES, ["sampled"]), *tiered(["greedy", "everything"], list(CASES))]
)
def test_the_text_is_that_of_plain_decoding(target, expected, name: str, params: str) -> None:
    """Alone, together, and with requests that join while others run; a memory that outlives requests changes nothing."""
    method, num_accepted = method_of(name, target), 0
    for batch, count in ((1, 1), (8, 5)) if params == "sampled" else ((3, 5),):
        states = serve(target, method, PARAMS[params], PROMPTS[:count], batch=batch)
        assert tokens(states) == expected[params][:count]
        num_accepted += sum(s.stats.num_accepted for s in states)
    assert num_accepted > 0, "the case tests nothing"


@pytest.mark.parametrize(
    ("name", "rule"),
    tiered(["rejection", "block"], [name for name in CASES if "tree" not in name and "branches" not in name]),
)
def test_rules_for_sampled_guesses_are_greedy_exact(target, expected, name: str, rule: str) -> None:
    method = method_of(name, target, acceptance=rule)
    assert method.drafter.draws is Draws.IID
    assert tokens(serve(target, method, PARAMS["greedy"], batch=8)) == expected["greedy"]
    sampled = serve(target, method, PARAMS["sampled"], batch=8)
    assert all(state.is_finished for state in sampled) and sum(s.stats.num_accepted for s in sampled) > 0


@pytest.mark.parametrize("name", list(CASES))
def test_the_cache_after_every_commit_is_that_of_a_fresh_prefill(target, name: str) -> None:
    requests = [Request(p, SamplingParams(max_tokens=9, ignore_eos=True)) for p in PROMPTS[2:6]]
    assert_always_fresh(Engine(target, method_of(name, target)), requests)


def propose(target: LayeredTarget, method: Method, plan: Plan, *, temperature: float = 0.0) -> tuple[Draft, Context]:
    """One draft for three rows of different lengths, and its context."""
    rows = [RequestState.of(Request(p, SamplingParams(temperature=temperature, seed=1))) for p in PROMPTS[3:6]]
    cache = target.new_cache(3)
    taps = target.prefill([row.tokens[:-1] for row in rows], cache, taps=method.drafter.taps)
    noise = Noise(torch.tensor([1, 1, 1]), torch.zeros(3, dtype=torch.int64))
    context = Context([row.tokens for row in rows], Sampler(rows, VOCAB, target.device), noise, target.device, cache)
    state = method.drafter.start([row.tokens for row in rows], taps)
    return method.drafter.propose(state, context, plan), context


def test_sampled_guesses_come_with_the_law_they_were_drawn_from(target) -> None:
    """q at every node that has a guess is the exit's own law after that node's path, worked out alone."""
    draft, context = propose(
        target, method_of("exit 5", target, acceptance="rejection"), Plan((3, 2, 3), (3, 2, 3)), temperature=0.7
    )
    assert draft.q is not None and draft.tree.sizes == (4, 3, 4)
    for row, size in enumerate(draft.tree.sizes):
        for node in range(size - 1):
            text = [*context.tokens[row], *draft.tree.tokens[row, 1 : node + 1].tolist()]
            hidden = target.exit(TokenTree.chain(torch.tensor([text])), target.new_cache(1), route=Route.first(5, LAYERS))
            law = torch.softmax(target.logits(hidden)[0, -1] / 0.7, -1)
            torch.testing.assert_close(draft.q[row, node], law, atol=1e-5, rtol=1e-4)


def test_the_pass_goes_on_from_what_was_drafted(target) -> None:
    """All nodes but those never fed: the last guess of a chain, the last level of a tree."""
    chain, _ = propose(target, method_of("exit 5", target), Plan((3, 3, 3), (3, 3, 3)))
    assert chain.resume is not None and (chain.resume.layer, chain.resume.num_nodes) == (5, 3)
    tree, _ = propose(target, method_of("tree", target), Plan((3, 3, 3), (15, 15, 15)))
    assert tree.resume is not None and (tree.resume.num_nodes, tree.tree.num_nodes) == (1 + 3 + 6, 1 + 3 + 6 + 6)
    ragged, _ = propose(target, method_of("tree", target), Plan((1, 3, 3), (3, 15, 7)))
    assert ragged.resume is not None and 1 <= ragged.resume.num_nodes < 10
    skipping, _ = propose(target, method_of("draft-verify, both", target), Plan((3, 3, 3), (3, 3, 3)))
    assert skipping.resume is None


def test_side_branches_stand_beside_every_guess(target) -> None:
    """The chain is that of plain swift; its siblings are the next best, and budgets and depths are kept."""
    options = {"threshold": 0.0, "max_trials": 0}
    chain, _ = propose(target, compose("swift", target, options=options), Plan((4, 2, 3), (4, 2, 3)))
    method = compose("swift", target, options={**options, "branches": True})
    tree, context = propose(target, method, Plan((4, 2, 3), (30, 30, 7)))
    assert isinstance(method.drafter, SwiftTree)
    check(tree, context.tokens, Plan((4, 2, 3), (30, 30, 7)))
    for row, drafted in enumerate(chain.num_drafted):
        size, node, path = tree.tree.sizes[row], 0, list[int]()
        parents = tree.tree.parents[row, :size].tolist()
        while node in parents:
            node = parents.index(node)  # the first child goes on
            path.append(int(tree.tree.tokens[row, node]))
        assert path == chain.tree.tokens[row, 1 : len(path) + 1].tolist() and (len(path) == drafted or size == 8)
        assert size - 1 > len(path)
    with pytest.raises(CompositionError, match="deterministic"):
        compose("swift", target, acceptance="rejection", options={"branches": True})


IDLE: dict[str, Any] = {"idle_attention": (3, 4, 5), "idle_mlp": (3, 4, 5)}
PERFECT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "early-exit": ("early-exit", {"exit_layer": 3, "num_draft_tokens": 5}, IDLE),
    "early-exit tree": (
        "early-exit",
        {"exit_layer": 3, "branching": (2, 1, 1, 1, 1), "num_draft_tokens": 5, "num_tree_nodes": 10},
        IDLE,
    ),
    "kangaroo": ("kangaroo", {"exit_layer": 3, "threshold": 0.0, "num_draft_tokens": 5}, IDLE),
    "specee": ("specee", {"exits": (3, 5), "threshold": 0.0, "num_draft_tokens": 5}, IDLE),
    "draft-verify": (
        "draft-verify",
        {"skip_attention": (1, 4), "skip_mlp": (2,), "threshold": 0.0, "num_draft_tokens": 5},
        {"idle_attention": (1, 4), "idle_mlp": (2,)},
    ),
}


@pytest.mark.parametrize(("way", "params"), in_turn(("alone", "together"), ("greedy", "sampled")))
@pytest.mark.parametrize("name", list(PERFECT))
def test_a_part_that_is_as_good_as_the_whole_is_never_wrong(name: str, way: str, params: str) -> None:
    """Where the sublayers left out do nothing, every guess is accepted, in ragged batches and at any temperature."""
    row, options, idle = PERFECT[name]
    target = thinned_model(**idle)
    batch, prompts = (1, PROMPTS[:2]) if way == "alone" else (4, PROMPTS)
    expected = tokens(serve(target, compose("plain", target), PARAMS[params], prompts, batch=8))
    states = serve(target, compose(row, target, options=options), PARAMS[params], prompts, batch=batch)
    assert tokens(states) == expected
    passes = sum(-(-s.num_output // 6) for s in states)  # 5 guesses and the bonus
    assert sum(s.stats.num_passes for s in states) == passes


def test_kangaroo_keeps_the_unsure_guess() -> None:
    """A threshold nothing reaches still leaves one guess per round; a threshold of 0 stops nothing."""
    target, sizes = thinned_model(strength=0.35), list[int]()
    for threshold, expected in ((1.0, {2}), (0.0, {5})):
        sizes.clear()
        method = compose("kangaroo", target, options={"threshold": threshold, "num_draft_tokens": 4})
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        serve(target, method, params, PROMPTS[:1], sizes=sizes)
        assert set(sizes[:2]) == expected  # the last rounds have no room


def test_swift_finds_what_can_be_skipped_and_remembers_it() -> None:
    """Five of eight inner sublayers do nothing: the search finds skip sets among them, and later requests begin with one."""
    target = thinned_model(idle_attention=(1, 3, 4), idle_mlp=(2, 4))
    options = {"window": 12, "skip_share": 0.4, "threshold": 0.0, "num_draft_tokens": 3, "max_score": 1.0}
    method = compose("swift", target, options=options)
    assert isinstance(method.drafter, Swift)
    memory, params = method.drafter.memory, SamplingParams(max_tokens=120, ignore_eos=True)
    assert memory.is_active and memory.num_trials == 0
    first = serve(target, method, params, PROMPTS[2:5])
    assert memory.score == 1.0 and not memory.is_active and memory.num_trials > 0
    skipped = {(kind, layer) for kind in ("attention", "mlp") for layer in range(LAYERS) if not vars(memory.route)[kind][layer]}
    assert len(skipped) == memory.space.num_skipped == 3
    later = serve(target, method, params, PROMPTS[2:5])
    assert tokens(later) == tokens(first) and rate(later) > rate(first) and rate(later) > 3.5
    shared = compose("swift", target, options={**options, "memory": memory})
    assert isinstance(shared.drafter, Swift) and shared.drafter.memory is memory


def test_del_finds_the_exit_that_pays() -> None:
    """All layers from the third on do nothing: the third is the first exit that is always right."""
    target = thinned_model(**IDLE)
    method = compose("del", target, options={"look_every": 2, "num_draft_tokens": 6})
    assert isinstance(method.drafter, DynamicExit)
    states = serve(target, method, SamplingParams(max_tokens=60, ignore_eos=True), PROMPTS[2:6], batch=2)
    choice = method.drafter.memory.choose(6)
    assert choice.exit == 3 and choice.depth == 6
    assert rate(states) > 2


def test_del_drafts_nothing_where_no_exit_pays(target) -> None:
    memory = ExitStatistics((3,), LAYERS)
    memory.learn(3, torch.zeros(200, dtype=torch.bool), torch.full((200,), 0.5))
    draft, _ = propose(target, compose("del", target, options={"memory": memory, "prompt_window": 0}), Plan((6,) * 3, (6,) * 3))
    assert draft.tree.sizes == (1, 1, 1) and draft.resume is None
    with pytest.raises(CompositionError, match="7 layers and the target has 6"):
        compose("del", target, options={"memory": ExitStatistics((3,), 7)})


@pytest.mark.parametrize("name", ["early-exit", "kangaroo", "draft-verify", "swift", "del", "specee"])
def test_a_target_that_cannot_be_taken_apart_is_refused(name: str) -> None:
    with pytest.raises(CompositionError, match=rf"{name}.*Markov runs them only together"):
        compose(name, Markov(torch.zeros(4, 4)))


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("early-exit", {"exit_layer": 6}, "exit_layer = 6 .* from 1 to 5"),
        ("early-exit", {"branching": "2,x"}, "branching"),
        ("kangaroo", {"threshold": 2.0}, "threshold"),
        ("draft-verify", {"skip_mlp": "6"}, "layer 6 cannot be skipped"),
        ("draft-verify", {"skip_attention": "a"}, "skip_attention"),
        ("swift", {"skip_share": 1.0}, "skip_share"),
        ("swift", {"window": 0}, "window"),
        ("del", {"exits": "2,6"}, "exits holds 6"),
        ("del", {"look_every": 0}, "look_every"),
        ("specee", {"exits": "2,6"}, "exits = '2,6' .* from 1 to 5"),
        ("specee", {"exits": "two"}, "exits = 'two'"),
        ("specee", {"threshold": -1.0}, "threshold"),
        ("specee", {"num_exits": 0}, "num_exits"),
        ("specee", {"predictor": "somewhere", "exits": "2"}, "leave exits out"),
    ],
)
def test_bad_options_are_refused(target, name: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        compose(name, target, options=options)


def test_trees_and_chains_of_an_exit_have_their_rules(target) -> None:
    with pytest.raises(CompositionError, match="grows trees"):
        compose("early-exit", target, acceptance="rejection", options={"branching": (2, 2)})
    states = serve(
        target,
        compose("early-exit", target, acceptance="recursive", options={"branching": (2, 2), "num_tree_nodes": 6}),
        PARAMS["greedy"],
        batch=8,
    )
    assert tokens(states) == tokens(serve(target, compose("plain", target), PARAMS["greedy"]))
