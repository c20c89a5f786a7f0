"""SpecEE: nodes that stop at different layers, any predictor lossless, which layers are asked, and what training learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thinned import LAYERS, VOCAB, thinned_model
from tiers import in_turn

from outrider.api import LLM
from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Observation
from outrider.core.layered_target import LayeredTarget
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.drafters.itself.specee import SpecEE
from outrider.drafters.itself.staircase import Staircase
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.exit_predictor import ExitPredictor, SureExits, exit_features, load_exit_predictor
from outrider.train.data import Corpus, Document
from outrider.train.loop import Settings, train
from outrider.train.specee import SpecEEObjective, SpecEESettings

IDLE = (3, 4, 5)
PROMPTS = [[1 + 7 * i % 50, 2 + i, *range(3, 3 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def target() -> LayeredTarget:
    return thinned_model(strength=0.35)


def hidden_size(target: LayeredTarget) -> int:
    chain = TokenTree.chain(torch.tensor([[1]]))
    return target.exit(chain, target.new_cache(1), route=Route.first(1, target.num_layers)).shape[-1]


def random_predictor(target: LayeredTarget, folder: Path, *, seed: int = 3) -> str:
    torch.manual_seed(seed)
    predictor = ExitPredictor((1, 2, 4, 5), width=8)
    predictor.first_right += torch.tensor([5.0, 1.0, 9.0, 0.0])
    predictor.save(folder, target, hidden_size(target), {})
    return str(folder)


def texts(
    target: LayeredTarget, name: str, *, temperature: float = 0.0, acceptance: str | None = None, **options: object
) -> tuple[list[list[int]], int]:
    """What is said, and how many guesses were accepted."""
    asked = [Request(p, SamplingParams(max_tokens=20, temperature=temperature, seed=i)) for i, p in enumerate(PROMPTS)]
    done = {}
    for step in run(Engine(target, compose(name, target, options=options, acceptance=acceptance)), asked, max_batch_size=4):
        done[step.request] = step.state
    states = [done[i] for i in range(len(asked))]
    return [list(state.output_ids) for state in states], sum(state.stats.num_accepted for state in states)


def bundled() -> LayeredTarget:
    found = LLM(method="plain", dtype="float32").target
    assert isinstance(found, LayeredTarget)
    return found


@pytest.mark.parametrize("kind", ["decoder", "bundled"])
def test_a_staircase_gives_the_states_of_the_first_layers(target: LayeredTarget, kind: str) -> None:
    """In whatever order nodes climb, their states are those of one pass, and so are the scores that go on from them."""
    target = target if kind == "decoder" else bundled()
    tokens, rows = torch.tensor([[3, 9, 4, 7], [8, 2, 2, 5]]), [[1, 2, 3], [4, 5, 6, 7, 8]]
    cache, plain = target.new_cache(2), target.new_cache(2)
    for each in (cache, plain):
        target.prefill(rows, each)
    stairs, climbs = Staircase(target, cache), [(1, 4), (1,), (2, 3), (1, 2, 5)]
    for node, layers in enumerate(climbs):
        chain = TokenTree.chain(tokens[:, : node + 1])
        stairs.add()
        for layer in layers:
            found = stairs.climb(chain, layer)
            whole = target.exit(chain, plain, route=Route.first(layer, target.num_layers))
            torch.testing.assert_close(found[:, 0], whole[:, -1], atol=1e-4, rtol=1e-4)
        assert stairs.depths == sorted(stairs.depths, reverse=True)
    assert stairs.depths == [5, 5, 5, 5]
    chain = TokenTree.chain(tokens)
    scores = target.score(chain, cache, resume=stairs.resume(chain)).logits
    torch.testing.assert_close(scores, target.score(chain, plain).logits, atol=1e-3, rtol=1e-3)


def test_what_lags_behind_is_levelled_for_the_verifying_pass(target: LayeredTarget) -> None:
    tokens, cache, plain = torch.tensor([[3, 9, 4]]), target.new_cache(1), target.new_cache(1)
    stairs = Staircase(target, cache)
    for node, layer in enumerate((5, 3, 1)):
        stairs.add()
        stairs.climb(TokenTree.chain(tokens[:, : node + 1]), layer)
    assert stairs.depths == [5, 3, 1]
    resume = stairs.resume(TokenTree.chain(tokens))
    assert isinstance(resume, Resume) and (resume.layer, resume.num_nodes) == (5, 3)
    whole = target.exit(TokenTree.chain(tokens), plain, route=Route.first(5, LAYERS))
    torch.testing.assert_close(resume.hidden, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("seed", "temperature"), in_turn((0, 1), (0.0, 0.8)))
def test_a_random_predictor_is_lossless(target: LayeredTarget, tmp_path: Path, seed: int, temperature: float) -> None:
    folder, accepted = random_predictor(target, tmp_path, seed=seed), 0
    expected, _ = texts(target, "plain", temperature=temperature)
    for more in ({"threshold": 0.45}, {"threshold": 0.5, "recent": 0}, {"threshold": 0.0, "num_exits": 2}):
        said, count = texts(target, "specee", temperature=temperature, predictor=folder, **more)
        assert said == expected
        accepted += count
    assert accepted > 0, "nothing was tested"


def test_the_offline_level_keeps_the_exits_that_were_first_right_and_the_deepest(target: LayeredTarget, tmp_path: Path) -> None:
    predictor = load_exit_predictor(random_predictor(target, tmp_path), target)
    assert predictor.scheduled(1) == (5,) and predictor.scheduled(2) == (4, 5) and predictor.scheduled(3) == (1, 4, 5)
    assert predictor.scheduled(9) == (1, 2, 4, 5)
    assert SureExits(range(1, 9)).scheduled(4) == (2, 4, 6, 8)


def drafter_of(target: LayeredTarget, **options: object) -> SpecEE:
    found = compose("specee", target, options=options).drafter
    assert isinstance(found, SpecEE)
    return found


def test_the_online_level_asks_near_the_last_accepted_exits(target: LayeredTarget) -> None:
    drafter = drafter_of(target, exits="1,2,3,4,5", reach=1, recent=2)
    assert drafter.layers_to_ask([(2,), ()]) == (1, 2, 3, 4, 5)
    assert drafter.layers_to_ask([(2,)]) == (1, 2, 3, 5) and drafter.layers_to_ask([(1,), (4, 4)]) == (1, 2, 3, 4, 5)
    state = drafter.start([[1], [2]], {})
    state.drafted = [(3, 4, 5), (1,)]
    seen: Observation = SimpleNamespace(num_accepted=[3, 0])  # type: ignore[assignment]
    drafter.observe(state, seen)
    assert state.recent == [(4, 5), ()] and state.fork([1, 0, 0]).recent == [(), (4, 5), (4, 5)]


@pytest.mark.parametrize(("threshold", "sizes"), [(1.0, {2}), (0.0, {5})])
def test_a_guess_that_nobody_trusts_is_kept_and_is_the_last(target: LayeredTarget, threshold: float, sizes: set[int]) -> None:
    method = compose("specee", target, options={"threshold": threshold, "num_draft_tokens": 4}, policy="fixed")
    asked = [Request(PROMPTS[3], SamplingParams(max_tokens=12, ignore_eos=True))]
    seen = [len(step.trace.tokens) for step in run(Engine(target, method), asked, max_batch_size=1)]
    assert set(seen[:2]) == sizes


def corpus(target: LayeredTarget) -> Corpus:
    """Texts that the target wrote."""
    asked = [Request([i % 50, 3 * i % 49, 5], SamplingParams(max_tokens=24, temperature=1.0, seed=i)) for i in range(24)]
    done: dict[int, Sequence[int]] = {}
    for step in run(Engine(target, compose("plain", target)), asked, max_batch_size=24):
        done[step.request] = list(step.state.tokens)
    return Corpus.of([Document(tuple(text), 3) for text in done.values()], held_out=6)


def test_training_finds_the_layer_from_which_nothing_changes(tmp_path: Path) -> None:
    """Layers 4 to 6 of this model do nothing: the exit after the third is always right, and its predictor says so."""
    target = thinned_model(idle_attention=IDLE, idle_mlp=IDLE)
    settings = Settings(max_steps=60, batch_size=8, row_len=64, judge_every=20, learning_rate=1e-2, warmup_steps=1)
    objective = SpecEEObjective(target, SpecEESettings(width=16))
    assert objective.taps == (1, 2, 3, 4, 5)
    finished = train([objective], target, corpus(target), tmp_path, settings=settings)[0]
    assert finished.best > 4  # of at most 1 + 5 exits judged rightly
    folder = str(tmp_path / "specee")
    predictor = load_exit_predictor(folder, target)
    assert predictor.first_right[3:].sum() == 0 < predictor.first_right[2]
    features = exit_features(torch.randn(5, VOCAB), None, 4)
    assert (predictor.chances(3, features) > 0.5).all()
    for temperature in (0.0, 1.0):
        said, accepted = texts(target, "specee", temperature=temperature, predictor=folder)
        assert said == texts(target, "plain", temperature=temperature)[0] and accepted > 60


def test_features_are_those_of_the_exits_own_best_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).log()
    before = torch.tensor([[1.0, 1.0, 1.0]]).log()
    found = exit_features(logits.clamp(min=-50), before, 2)
    expected = torch.tensor([[2 / 3, 1 / 3]])
    torch.testing.assert_close(found, torch.cat([expected.log(), expected, expected - 0.5], -1), atol=1e-5, rtol=1e-5)
    assert exit_features(logits, None, 2)[0, 4:].tolist() == [0.0, 0.0]


def test_folders_that_do_not_fit_are_refused(target: LayeredTarget, tmp_path: Path) -> None:
    folder = random_predictor(target, tmp_path)
    with pytest.raises(ModelError, match="another target"):
        load_exit_predictor(folder, bundled())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no predictor of early exits.*outrider train specee"):
        compose("specee", target, options={"predictor": folder})
    with pytest.raises(OptionError, match="num_tokens = 99"):
        SpecEEObjective(target, SpecEESettings(num_tokens=99))
    with pytest.raises(OptionError, match="width = 0"):
        SpecEESettings(width=0)
