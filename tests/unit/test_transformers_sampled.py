"""Sampled text of the drop-in is that of plain ``generate`` with the same seed, and torch's generator ends where it would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transformers_options import LAWS, shifted
from tiers import in_turn
from tiny_transformers import FAMILIES, MASK, PROCESSORS, RAGGED, SAMPLED, VOCAB, noisy, shared
from torch import Tensor
from transformers import LogitsProcessorList

import outrider.transformers as drop_in
from outrider.core.errors import OptionError
from outrider.transformers import hf_noise
from outrider.transformers.hf_noise import TorchNoise

ENDS: dict[str, Any] = {**SAMPLED, "eos_token_id": [2, 5, 6, 7, *range(20, 32)]}


def seeded(model: Any, loop: drop_in.DropIn, **options: Any) -> Tensor:
    """The text of ``generate``, which must be the same with the drop-in. So must be the generator's state afterwards."""
    torch.manual_seed(11)
    expected = model.generate(RAGGED, **options)
    state = torch.get_rng_state()
    torch.manual_seed(11)
    assert torch.equal(model.generate(RAGGED, **options, custom_generate=loop), expected)
    assert torch.equal(torch.get_rng_state(), state)
    return expected


@pytest.mark.parametrize(("family", "processors"), in_turn(FAMILIES, ("many", "none")))
def test_sampled_text_is_that_of_generate(family: str, processors: str) -> None:
    model, loop = shared(family), drop_in.generate("suffix", num_draft_tokens=4)
    seeded(model, loop, **SAMPLED, **({**PROCESSORS, "top_p": 0.9} if processors == "many" else {}))


@pytest.mark.parametrize("options", LAWS, ids="-".join)
def test_processors_of_every_kind(options: dict[str, Any]) -> None:
    seeded(shared(), drop_in.generate("suffix", num_draft_tokens=4), **{**SAMPLED, **options})


def test_rows_that_end_go_on_taking_numbers() -> None:
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4)
    found = seeded(shared("llama"), loop, **ENDS, num_return_sequences=2)
    lengths = (found[:, RAGGED.shape[1] :] != 0).sum(1)
    assert found.shape[0] == 6 and len(set(lengths.tolist())) > 1
    seeded(shared("llama"), loop, **ENDS, logits_processor=LogitsProcessorList([shifted]))  # type: ignore[list-item]


@pytest.mark.parametrize("method", ["draft-model", "best-first", "rsd-s"])
def test_guesses_of_a_draft_follow_the_same_numbers(method: str) -> None:
    loop = drop_in.generate(method, draft=noisy(), num_draft_tokens=4)
    seeded(shared(), loop, **{**SAMPLED, "temperature": 2.5, "top_k": 0, "max_new_tokens": 24})
    assert all(stats.tokens_per_pass > 1.5 for stats in loop.stats)


def test_scores_of_sampled_text_are_those_of_generate() -> None:
    asked = {**SAMPLED, "eos_token_id": None, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    answers = []
    for more in ({}, {"custom_generate": drop_in.generate("suffix", num_draft_tokens=4)}):
        torch.manual_seed(5)
        answers.append(shared().generate(RAGGED, **asked, **more))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(answers[1][name]), torch.stack(answers[0][name]), atol=1e-3, rtol=1e-3)


def test_later_calls_go_on_in_the_same_sequence_of_numbers() -> None:
    texts = []
    for more in ({}, {"custom_generate": drop_in.generate("suffix", num_draft_tokens=4)}):
        torch.manual_seed(3)
        texts.append([shared().generate(RAGGED, **ENDS, **more).tolist() for _ in range(3)] + [torch.rand(2).tolist()])
    assert texts[0] == texts[1]


def test_every_step_is_a_draw_of_multinomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of steps, and when numbers have to be drawn again."""
    monkeypatch.setattr(hf_noise, "_KEPT", 2)
    logits = 3 * torch.randn(9, 4, VOCAB, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(8)
    noise = TorchNoise(4, torch.device("cpu"))
    for step in (3, 0, 8, 1, 1, 7, 2, 5, 4, 6):
        chosen = [int(noise.scores(logits[step, row], step, row).argmax()) for row in range(4)]
        after = noise._states[step]
        generator = torch.Generator()
        generator.set_state(after)
        drawn = torch.multinomial(logits[step].softmax(-1), 1, generator=generator)
        assert chosen == drawn[:, 0].tolist()
    noise.settle(9)
    later = torch.rand(3)
    torch.manual_seed(8)
    for step in range(9):
        torch.multinomial(logits[step].softmax(-1), 1)
    assert torch.equal(torch.rand(3), later)


def test_a_call_that_fails_leaves_the_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(OptionError, match="num_beams"):
        shared().generate(RAGGED, attention_mask=MASK, do_sample=True, num_beams=2, custom_generate=drop_in.generate())
    assert torch.equal(torch.get_rng_state(), before)


def test_whose_numbers_are_used_is_an_option() -> None:
    with pytest.raises(OptionError, match="own, torch"):
        drop_in.generate(noise="mine")
    with pytest.raises(OptionError, match="lossy"):
        drop_in.generate("draft-model", draft=noisy(), acceptance="typical", noise="torch")
    assert drop_in.generate("draft-model", draft=noisy(), acceptance="typical").noise == "own"
    assert drop_in.generate().noise == "torch"
    with pytest.raises(OptionError, match="noise='own'"):
        TorchNoise(1, torch.device("meta"))
