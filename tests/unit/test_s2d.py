"""S2D: nested exits of a draft, chosen by confidence; what waits for deeper layers is filled in late, and exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_prefill import assert_fresh
from killed_run import assert_goes_on_exactly
from markov import Markov
from test_methods import EVERYTHING, SAMPLED
from test_train import CORPUS, TARGET
from thinned import LAYERS, VOCAB, thinned_model
from tiers import in_turn
from tiny_pair import _RAW

from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.interfaces import Context, Plan
from outrider.core.layered_target import LayeredTarget
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.resume import Resume
from outrider.core.rng import Noise
from outrider.core.route import Route
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.model.s2d import SortedDraft, exits_of
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.config import config_of
from outrider.train.draft_lm import DraftLM
from outrider.train.features import DocumentRows, compute
from outrider.train.loop import Settings, train
from outrider.train.sorted import SortedObjective, SortedSettings

EOS = frozenset({VOCAB - 1})
PROMPTS = [[random.Random(i).randrange(VOCAB - 1) for _ in range(1 + 5 * i % 17)] for i in range(6)]
PROMPTS.append([random.Random(9).randrange(VOCAB - 1) for _ in range(90)])  # too long to wait
PARAMS = {"greedy": SamplingParams(max_tokens=24), "sampled": SAMPLED, "everything": EVERYTHING}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "three exits": {"exits": "1,3,6", "threshold": 0.5},
    "rarely deep": {"exits": (2, 6), "threshold": 0.2, "num_draft_tokens": 9},
    "always deep": {"exits": "1,2,6", "threshold": 1.0, "stop_threshold": 0.0},
    "never deep": {"exits": "4,6", "threshold": 0.0, "num_draft_tokens": 4},
    "one exit": {"exits": "6"},
}


@pytest.fixture(scope="module")
def target() -> LayeredTarget:
    return thinned_model(strength=0.35)


@pytest.fixture(scope="module")
def draft() -> LayeredTarget:
    return thinned_model(strength=0.32)


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[list[int]]]:
    return {name: serve(target, compose("plain", target), params)[0] for name, params in PARAMS.items()}


def method_of(target: LayeredTarget, draft: LayeredTarget, name: str, **more: Any) -> Method:
    return compose("s2d", target, draft=draft, options=CASES[name], **more)


def serve(target: LayeredTarget, method: Method, params, *, batch: int = 1) -> tuple[list[list[int]], int]:
    """Texts, and how many guesses were accepted."""
    done: dict[int, RequestState] = {}
    for step in run(Engine(target, method), [Request(prompt, params, EOS) for prompt in PROMPTS], max_batch_size=batch):
        if step.state.is_finished:
            done[step.request] = step.state
    return [done[i].output_ids for i in range(len(PROMPTS))], sum(state.stats.num_accepted for state in done.values())


@pytest.mark.parametrize(("name", "params"), in_turn(CASES, ("greedy", "sampled")))
def test_the_text_is_that_of_plain_decoding(target, draft, expected, name: str, params: str) -> None:
    """Together, and with requests that join while others run."""
    batch = 8 if params == "greedy" else 3
    texts, num_accepted = serve(target, method_of(target, draft, name), PARAMS[params], batch=batch)
    assert texts == expected[params]
    assert num_accepted > 0, "the case tests nothing"


def test_every_sampling_parameter_alone(target, draft, expected) -> None:
    texts, num_accepted = serve(target, method_of(target, draft, "three exits"), PARAMS["everything"])
    assert texts == expected["everything"] and num_accepted > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_for_sampled_guesses_are_greedy_exact(target, draft, expected, rule: str) -> None:
    method = method_of(target, draft, "three exits", acceptance=rule)
    assert method.drafter.draws is Draws.IID
    assert serve(target, method, PARAMS["greedy"], batch=8)[0] == expected["greedy"]


def test_confidence_decides_the_exit(target, draft) -> None:
    """A bar of 0 is always passed and one of 1 hardly ever; between them all exits are used."""
    counts = {}
    for name in ("three exits", "always deep", "never deep"):
        method = method_of(target, draft, name)
        serve(target, method, PARAMS["greedy"], batch=3)
        assert isinstance(method.drafter, SortedDraft)
        counts[name] = method.drafter.num_guesses
    assert all(counts["three exits"]) and not counts["never deep"][1] and not any(counts["always deep"][:2])


@pytest.mark.parametrize("name", ["three exits", "rarely deep", "always deep"])
def test_the_cache_filled_late_is_that_of_a_fresh_prefill(target, draft, name: str) -> None:
    """Whatever waited and for how long, in a ragged batch; and some tokens did wait over a round."""
    engine, lags = Engine(target, method_of(target, draft, name, policy="fixed")), set[int]()
    batch = engine.start([Request(p, SamplingParams(max_tokens=20, ignore_eos=True)) for p in PROMPTS[2:6]])
    while batch.rows:
        engine.step(batch)
        state: Any = batch.drafter_state
        assert_fresh(target, batch.cache, batch.rows)
        assert_fresh(draft, state.cache, batch.rows, most_lag=64)
        lags |= {len(row.tokens) - 1 - n for row, n in zip(batch.rows, state.cache.lengths) if not row.is_finished}
        for layer, states in zip(engine.method.drafter.exits, state.reached):  # type: ignore[attr-defined]
            assert_states(draft, batch.rows, state.cache.lengths, layer, states)
        batch = batch.without_finished()
    assert max(lags) > 1 if name == "rarely deep" else max(lags) <= 1, "an unsure row takes the others along"


def assert_states(draft: LayeredTarget, rows, lengths: list[int], layer: int, states: torch.Tensor) -> None:
    """What waits at an exit is what a prefill has there."""
    taps = draft.prefill([row.tokens for row in rows], draft.new_cache(len(rows)), taps=(layer,))[layer]
    for row, (done, fresh) in enumerate(zip(lengths, taps, strict=True)):
        if not rows[row].is_finished:
            torch.testing.assert_close(states[row], fresh[done : done + states.shape[1]], atol=1e-4, rtol=1e-4)


def test_every_guess_is_that_of_the_first_sure_exit(target, draft) -> None:
    """Worked out alone, from whole prefills; a row's guesses do not depend on the rows beside it."""
    method = compose("s2d", target, draft=draft, options={"exits": "1,3,6", "threshold": 0.5, "stop_threshold": 0.0})
    rows = [RequestState.of(Request(prompt, SamplingParams())) for prompt in PROMPTS[1:6]]
    noise = Noise(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    context = Context([row.tokens for row in rows], Sampler(rows, VOCAB, target.device), noise, target.device)
    found = method.drafter.propose(method.drafter.start(context.tokens, {}), context, Plan((5, 4, 5, 2, 5), (5,) * 5)).tree
    assert found.sizes == (6, 5, 6, 3, 6)
    for row, prompt in enumerate(PROMPTS[1:6]):
        text = list(prompt)
        for guess in found.tokens[row, 1 : found.sizes[row]].tolist():
            assert guess == alone(draft, text)
            text.append(guess)


def alone(draft: LayeredTarget, text: list[int]) -> int:
    taps = draft.prefill([text], draft.new_cache(1), taps=(1, 3, 6))
    laws = [draft.logits(taps[layer][0][-1]).softmax(-1) for layer in (1, 3, 6)]
    return int(next((law for law in laws[:2] if law.max() >= 0.5), laws[2]).argmax())


def test_going_on_from_an_exit_is_the_whole_way(draft) -> None:
    """Also from the middle of a chain, whose first tokens have gone on before."""
    tree, cache, whole = TokenTree.chain(torch.tensor([[3, 5, 7, 9]] * 2)), draft.new_cache(2), draft.new_cache(2)
    for one in (cache, whole):
        draft.prefill([[1, 2], [4]], one)
    wanted = draft.exit(tree, whole, route=Route.first(4, LAYERS))
    below = draft.exit(tree, cache, route=Route.first(2, LAYERS))
    head = TokenTree.chain(tree.tokens[:, :2])
    first = draft.exit(head, cache, route=Route.first(4, LAYERS), begun=Resume(2, below[:, :2]))
    rest = draft.exit(tree, cache, route=Route.first(4, LAYERS), start=2, begun=Resume(2, below[:, 2:]))
    torch.testing.assert_close(torch.cat((first, rest), 1), wanted, atol=1e-5, rtol=1e-5)


def test_a_draft_with_a_shorter_context_stops_in_time(target, expected) -> None:
    short = thinned_model(strength=0.32, max_len=30)
    assert serve(target, method_of(target, short, "three exits"), PARAMS["sampled"], batch=8)[0] == expected["sampled"]


# --- training ---------------------------------------------------------------------------------------------------------


def fresh(num_layers: int, **changes: int) -> DraftLM:
    raw = {**_RAW, "num_hidden_layers": num_layers, **changes}
    config = config_of(raw)
    assert config is not None
    torch.manual_seed(0)
    return DraftLM(config, raw, Path())


def test_the_loss_is_the_mean_of_the_exits_own() -> None:
    model, documents = fresh(4), CORPUS.held_out[:3]
    batch = DocumentRows(compute(TARGET, documents, ()), documents, row_len=48, last=2).packed(())
    both, last = (SortedObjective(model, TARGET, SortedSettings(exits=exits)) for exits in ("1,4", "4"))
    with torch.no_grad():
        first = next(iter(model.climb(batch)))
        early, _ = both._compare.places(batch, model.model.norm(first), model)
        valid = batch.valid(0)
        wanted = ((early * valid).sum() / valid.sum() + last(batch).loss) / 2
        torch.testing.assert_close(both(batch).loss, wanted)


def test_every_exit_learns(tmp_path: Path) -> None:
    """One run teaches both exits the target's tokens, and the folder it writes drafts."""
    objective = SortedObjective(fresh(2), TARGET, SortedSettings(exits="1,2", loss="mixed"))
    before = [rate(objective.model, layer) for layer in (1, 2)]
    settings = Settings(max_steps=40, batch_size=8, row_len=48, judge_every=20, learning_rate=5e-3, warmup_steps=1)
    train([objective], TARGET, CORPUS, tmp_path, settings=settings)
    assert all(rate(objective.model, layer) > one for layer, one in zip((1, 2), before, strict=True))
    assert (tmp_path / "sorted" / "model.safetensors").is_file()


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_exactly(lambda: SortedObjective(fresh(2), TARGET, SortedSettings(exits="1,2")), tmp_path)


def rate(model: DraftLM, layer: int) -> float:
    """How often an exit's likeliest token is the target's, on held-out text."""
    documents = CORPUS.held_out[:6]
    batch = DocumentRows(compute(TARGET, documents, ()), documents, row_len=48, last=2).packed(())
    with torch.no_grad():
        states = list(model.climb(batch))[layer - 1]
        hits = model.logits(model.model.norm(states)).argmax(-1) == TARGET.logits(batch.last).argmax(-1)
    return float(hits[batch.valid(0)].float().mean())


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_exits_by_default_are_the_papers() -> None:
    assert exits_of(None, 12) == (6, 9, 12) and exits_of(None, 4) == (2, 3, 4) and exits_of(None, 1) == (1,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exits": "1,x"}, "layer numbers with commas"),
        ({"exits": "1,3"}, "6 layers, so use rising whole numbers from 1 that end with 6"),
        ({"exits": "3,1,6"}, "rising"),
        ({"threshold": 1.5}, "threshold = 1.5"),
        ({"stop_threshold": -1}, "stop_threshold = -1"),
    ],
)
def test_bad_options_are_refused(target, draft, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        compose("s2d", target, draft=draft, options=options)


def test_bad_training_is_refused() -> None:
    with pytest.raises(OptionError, match="judged_exit = 3 is not valid; use an exit: 1, 4"):
        SortedObjective(fresh(4), TARGET, SortedSettings(exits="1,4", judged_exit=3))
    with pytest.raises(ModelError, match="same vocabulary"):
        SortedObjective(fresh(4, vocab_size=40), TARGET, SortedSettings())


def test_a_draft_that_runs_only_whole_is_refused(target) -> None:
    with pytest.raises(CompositionError, match=r"runs the draft's layers apart.*draft-model"):
        compose("s2d", target, draft=Markov(torch.zeros(VOCAB, VOCAB)))
