"""Options of ``generate`` with the drop-in: processors, criteria, laws and answers as in transformers, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_transformers import GREEDY, LLAMA, MASK, RAGGED, SAMPLED, SIZES, VOCAB, both, noisy, random_model, shared
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import outrider.transformers as drop_in
from outrider.core.errors import CompositionError, ModelError, OptionError, OutriderError
from outrider.core.request import RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.transformers.drop_in import requests_of
from outrider.transformers.hf_processors import bound, processing_of
from outrider.transformers.hf_prompts import PaddedPrompts
from outrider.transformers.hf_stops import stopping_of


def test_options_that_change_scores_and_lengths() -> None:
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4)
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9, 10], "renormalize_logits": True},
        {"sequence_bias": [[[5, 6], 3.0]], "forced_eos_token_id": 2, "begin_suppress_tokens": [20]},
        {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": [2, 30], "min_length": 12},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 10 + len(ids) % 7, 20, 2]},
        {"encoder_repetition_penalty": 1.1, "num_return_sequences": 1},
    ]
    for options in rules[:-1]:
        both(shared(), loop, **GREEDY, **options)
    both(shared(), loop, **{**GREEDY, "max_new_tokens": None, "max_length": 15})
    alone = {**GREEDY, "attention_mask": None, **rules[-1]}
    expected = shared().generate(RAGGED[1:2], **alone)
    assert torch.equal(shared().generate(RAGGED[1:2], **alone, custom_generate=loop), expected)


def shifted(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor: it forbids the token after the last one."""
    return scores.scatter(1, (ids[:, -1:] + 1) % VOCAB, -torch.inf)


def evenly(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    """A user's criterion: it ends a row at a token that four divides."""
    return ids[:, -1] % 4 == 0


def test_processors_and_criteria_of_the_caller() -> None:
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4)
    processors, criteria = LogitsProcessorList([shifted]), StoppingCriteriaList([evenly])  # type: ignore[list-item]
    found = both(shared(), loop, **GREEDY, logits_processor=processors, stopping_criteria=criteria)
    plain = shared().generate(RAGGED, **GREEDY)
    assert found.shape[1] < plain.shape[1]


def test_a_processor_that_remembers_or_mixes_rows_is_refused_by_name() -> None:
    class Counting:
        calls = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores + self.calls * torch.arange(VOCAB)

    class Mixing:
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores - scores.mean(0)

    for processor, reason in ((Counting(), "Counting gives different results"), (Mixing(), "Mixing looks at other rows")):
        processors = LogitsProcessorList([processor])  # type: ignore[list-item]
        with pytest.raises(OptionError, match=reason):
            shared().generate(RAGGED, **GREEDY, logits_processor=processors, custom_generate=drop_in.generate())


def test_a_criterion_that_remembers_or_mixes_rows_is_refused_by_name() -> None:
    asked = iter(range(1000))

    def every_other(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), next(asked) % 2 == 1)

    def any_row(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (ids[:, 0] == 3).any().expand(len(ids))

    for criterion, reason in ((every_other, "every_other gives different results"), (any_row, "any_row looks at other rows")):
        criteria = StoppingCriteriaList([criterion])  # type: ignore[list-item]
        with pytest.raises(OptionError, match=reason):
            shared().generate(RAGGED, **GREEDY, stopping_criteria=criteria, custom_generate=drop_in.generate())


def test_with_its_own_noise_the_seed_of_torch_fixes_the_text_whatever_the_method() -> None:
    texts = []
    drafting = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4, noise="own")
    loops = [drop_in.generate("plain", noise="own"), drafting]
    for loop in loops * 2:
        torch.manual_seed(7)
        texts.append(shared().generate(RAGGED, **SAMPLED, top_p=0.9, custom_generate=loop).tolist())
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert shared().generate(RAGGED, **SAMPLED, custom_generate=loops[0]).tolist() != texts[0]


LAWS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.4, "top_k": 0},
    {"typical_p": 0.8, "top_k": 0, "repetition_penalty": 1.4, "suppress_tokens": [7], "no_repeat_ngram_size": 2},
    {"temperature": 1.2, "top_k": 12, "epsilon_cutoff": 0.02, "renormalize_logits": True},
    {"top_p": 0.8, "eta_cutoff": 0.01, "min_new_tokens": 2, "eos_token_id": [5, 6, 7]},
    {"top_h": 0.6, "top_k": 0, "bad_words_ids": [[5, 6]], "logits_processor": LogitsProcessorList([shifted])},  # type: ignore
]


@pytest.mark.parametrize("options", LAWS, ids="-".join)
def test_every_node_of_a_tree_has_the_law_of_generate(options: dict[str, Any]) -> None:
    """The law that the engine samples from, against the processors of transformers on each node's written-out path."""
    call: dict[str, Any] = {}

    def capture(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        call.update(prepared)
        return input_ids

    shared().generate(RAGGED, **{**SAMPLED, "temperature": 1.0, "top_k": 50, **options}, custom_generate=capture)
    prompts = PaddedPrompts.of(RAGGED, {"attention_mask": MASK})
    processing = processing_of(call["logits_processor"], prompts, do_sample=True)
    requests = requests_of(prompts, processing, stopping_of(call["stopping_criteria"], prompts))
    tree = TokenTree.of_rows([([row[-1], 5, 6, 7, 5, 6], [-1, 0, 0, 1, 2, 3]) for row in prompts.rows])
    logits = 3 * torch.randn(3, 6, VOCAB, generator=torch.Generator().manual_seed(5))
    sampler = Sampler([RequestState.of(request) for request in requests], VOCAB, torch.device("cpu"))
    law = sampler.law(logits, tree, Noise(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)))
    for row in range(3):
        processors = LogitsProcessorList(bound(call["logits_processor"], row))
        for node in range(6):
            path = tree.tokens[row, list(tree.path(row, node))]
            ids: Any = torch.cat((RAGGED[row], path))[None]
            expected = processors(ids, logits[row, node][None].clone()).softmax(-1)[0]
            torch.testing.assert_close(law.probs[row, node], expected, atol=1e-6, rtol=1e-4)


def test_sampled_tokens_come_as_often_as_their_probabilities_say() -> None:
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 1, "top_k": 6, "eos_token_id": None}
    torch.manual_seed(1)
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=1, noise="own")
    found = shared().generate(RAGGED[1:2], **settings, num_return_sequences=400, custom_generate=loop)[:, -1]
    asked = {"return_dict_in_generate": True, "output_scores": True}
    probs = shared().generate(RAGGED[1:2], **settings, **asked).scores[0].softmax(-1)[0]
    often = torch.bincount(found, minlength=VOCAB) / len(found)
    assert float((often - probs).abs().sum()) < 0.25 and bool((often[probs == 0] == 0).all())


def test_scores_and_logits_are_those_of_generate() -> None:
    asked = {**GREEDY, "eos_token_id": None, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4)
    expected = shared().generate(RAGGED, **asked, repetition_penalty=1.2)
    found = shared().generate(RAGGED, **asked, repetition_penalty=1.2, custom_generate=loop)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == GREEDY["max_new_tokens"]
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(expected[name]), atol=1e-3, rtol=1e-3)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_same_columns() -> None:
    theirs, ours = Recorder(), Recorder()
    shared().generate(RAGGED, **GREEDY, streamer=theirs)
    shared().generate(RAGGED, **GREEDY, streamer=ours, custom_generate=drop_in.generate("suffix", num_draft_tokens=4))
    assert ours.values == theirs.values and ours.ended


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "max_new_tokens of at most 57": {"max_new_tokens": 60},
    "token_type_ids": {"token_type_ids": torch.zeros_like(RAGGED)},
    "padding_side": {"attention_mask": MASK.flip(1)},
    "past_key_values": {"past_key_values": DynamicCache()},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(7).expand(3, -1)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    model = shared("gpt2") if name == "token_type_ids" else shared()
    with pytest.raises(OutriderError, match=name):
        model.generate(RAGGED, **{**GREEDY, **REFUSED[name]}, custom_generate=drop_in.generate())


def test_models_and_names_that_cannot_be_used() -> None:
    with pytest.raises(OptionError, match="did you mean 'suffix'"):
        drop_in.generate("sufix")
    with pytest.raises(OptionError, match="num_draft_tokens"):
        drop_in.generate("suffix", num_draft_token=3)
    with pytest.raises(CompositionError, match="draft="):
        drop_in.generate("draft-model")
    with pytest.raises(ModelError, match=r"model\.eval"):
        random_model("qwen3").train().generate(RAGGED, **GREEDY, custom_generate=drop_in.generate())
    with pytest.raises(OptionError, match="assistant_model"):
        shared().generate(RAGGED[1:2], max_new_tokens=4, assistant_model=noisy(), custom_generate=drop_in.generate())
    small = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**{**SIZES, "vocab_size": 31}, **LLAMA)).eval()
    with pytest.raises(ModelError, match="31 tokens"):
        shared().generate(RAGGED, **GREEDY, custom_generate=drop_in.generate("draft-model", draft=small))
