"""Which tokens can come at all: forced ones, banned ones, and parameters that leave nothing to choose from."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_pair import VOCAB, tiny_model

from outrider.core.draft import Draws
from outrider.core.errors import OptionError, RequestError
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, RULES, compose

INF = math.inf
EOS = frozenset({VOCAB - 1})
PLAIN_ROWS = ["plain", "prompt-lookup", "token-recycling", "jacobi", "draft-model", "draft-tree", "rsd-s", "spectr"]


def law(params: SamplingParams, logits: list[float]) -> list[float]:
    row = RequestState.of(Request([1], params))
    sampler = Sampler([row], len(logits), torch.device("cpu"))
    tree = TokenTree.chain(torch.tensor([[1]]))
    noise = Noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return sampler.law(torch.tensor([[logits]]), tree, noise).probs[0, 0].tolist()


def test_infinity_forces_a_token() -> None:
    assert law(SamplingParams(temperature=1.0, logit_bias={2: INF}), [5.0, 1.0, -3.0, 0.0]) == [0, 0, 1, 0]
    assert law(SamplingParams(logit_bias={2: INF}), [5.0, 1.0, -3.0, 0.0]) == [0, 0, 1, 0]


def test_several_forced_tokens_share_as_the_model_would() -> None:
    both = SamplingParams(temperature=1.0, logit_bias={0: INF, 2: INF, 1: 9.0}, repetition_penalty=1.0)
    found = law(both, [1.0, 5.0, 0.0, 2.0])
    assert found[1] == found[3] == 0 and found[0] / found[2] == pytest.approx(math.e)


def test_forced_tokens_under_penalties_and_cuts_are_numbers() -> None:
    params = SamplingParams(
        temperature=0.7, logit_bias={1: INF, 3: INF}, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.9, typical_p=0.9
    )
    found = law(params, [1.0, 5.0, 0.0, 2.0])
    assert all(math.isfinite(value) for value in found) and sum(found) == pytest.approx(1.0) and found[0] == found[2] == 0


@pytest.mark.parametrize("name", PLAIN_ROWS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_writes_the_forced_token(name: str, temperature: float) -> None:
    target, draft = tiny_model(), tiny_model(0.15)
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=1, logit_bias={7: INF})
    method = compose(name, target, draft=draft)
    states = [step.state for step in run(Engine(target, method), [Request([3, 4, 3, 4], params, EOS)], max_batch_size=1)]
    assert states[-1].output_ids == [7] * 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"banned_token_ids": range(VOCAB)}, "every token is banned"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -INF)}, "every token is banned"),
        ({"logit_bias": {5: INF}, "banned_token_ids": [5]}, "forces only tokens that are banned"),
        ({"banned_token_ids": range(VOCAB - 1), "min_tokens": 2}, "min_tokens = 2 forbids"),
        ({"logit_bias": {VOCAB - 1: INF}, "min_tokens": 1}, "min_tokens = 1 forbids"),
    ],
)
def test_nothing_to_choose_from_is_refused(options: dict, words: str) -> None:
    engine = Engine(tiny_model(), compose("plain", tiny_model()))
    with pytest.raises(RequestError, match=words):
        engine.start([Request([3], SamplingParams(**options), EOS)])


def test_one_token_left_is_fine() -> None:
    target = tiny_model()
    params = SamplingParams(max_tokens=3, banned_token_ids=range(1, VOCAB), temperature=1.0)
    (*_, last) = run(Engine(target, compose("plain", target)), [Request([3], params, EOS)], max_batch_size=1)
    assert last.state.output_ids == [0, 0, 0]


def test_every_row_whose_guesses_can_be_chosen_keeps_the_seed_by_default() -> None:
    """Guesses that are only sampled, as those of speculative Jacobi decoding, have a rule that keeps the law."""
    for name, row in METHODS.items():
        rule = RULES[row.acceptance].rule
        assert rule.keeps_seed or (rule.lossless and Draws.DETERMINISTIC not in row.drafter.offers), name


def test_an_output_says_whether_its_bits_depend_on_company(tmp_path, capsys) -> None:
    """Native passes do not; PyTorch's and transformers' do. `outrider info` says so before anything is loaded."""
    from test_hf_adapter import MODELS, random_model

    from outrider import LLM
    from outrider.cli.main import main
    from outrider.models.hf import HFModel
    from outrider.models.native import NativeDecoder

    params = SamplingParams(max_tokens=2)
    llm = LLM(method="plain", dtype="float32")
    assert llm.generate("hi", params)[0].is_invariant == isinstance(llm.target, NativeDecoder)
    assert not LLM(method="plain", dtype="float32", fast=False).generate("hi", params)[0].is_invariant
    model = random_model(*MODELS["gpt2"])
    assert not HFModel(model).traits.is_invariant
    model.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0 and "same bits     nowhere" in capsys.readouterr().out
    with pytest.raises(OptionError, match="method='plain' with max_batch_size=1"):
        LLM(str(tmp_path), method="plain", numerics="invariant")
    assert main(["info"]) == 0 and "same bits     on a CPU in float32" in capsys.readouterr().out


@pytest.mark.parametrize("is_built", [False, True])
def test_where_bits_hold_is_said_for_this_machine(is_built: bool, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler no native pass runs, so the promise does not hold here."""
    from outrider.cli.main import main

    monkeypatch.setattr("outrider.models.info.can_build", lambda: is_built)
    assert main(["info"]) == 0
    assert ("not here: the native pass needs" in capsys.readouterr().out) != is_built
