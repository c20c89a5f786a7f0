"""The drop-in for ``generate`` of transformers: the same greedy text, the same law, options honoured or refused by name."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    pipeline,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import outrider.transformers as drop_in
from outrider.bundled import bundled_path
from outrider.core.errors import CompositionError, ModelError, OptionError, OutriderError
from outrider.core.request import RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.transformers.drop_in import requests_of
from outrider.transformers.hf_processors import bound, processing_of
from outrider.transformers.hf_prompts import Prompts
from outrider.transformers.hf_stops import stopping_of

VOCAB = 53
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys("llama qwen2 qwen3 phi phi3 olmo olmo2 gpt_neox granite cohere cohere2".split(), LLAMA),
    **dict.fromkeys(("starcoder2", "falcon"), LLAMA),
    "mistral": {**LLAMA, "sliding_window": 5},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {**LLAMA, "head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT,
}
RAGGED = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 11, 12]])
MASK = (RAGGED != 0).long()
GREEDY: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
PROCESSORS: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
SAMPLED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 20}


def random_model(family: str) -> Any:
    torch.manual_seed(0)
    # eager: the fused kernels of some versions leave out the soft cap of attention scores
    model: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**SIZES, **FAMILIES[family]), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


@cache
def shared(family: str = "qwen3") -> Any:
    """A model that several tests read and none changes."""
    return random_model(family)


@cache
def noisy() -> Any:
    """A draft that is often right: the model's weights with noise."""
    model = copy.deepcopy(shared())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


def both(model: Any, loop: drop_in.DropIn, **options: Any) -> Tensor:
    """The text of ``generate``, which must be the same with the drop-in."""
    expected = model.generate(RAGGED, **options)
    assert torch.equal(model.generate(RAGGED, **options, custom_generate=loop), expected)
    return expected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    model, loop = shared(family), drop_in.generate("suffix", num_draft_tokens=4)
    both(model, loop, **GREEDY)
    assert sum(stats.num_passes for stats in loop.stats) > 0
    both(model, loop, **GREEDY, **PROCESSORS)


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "token-recycling", "ngram-cache"])
def test_every_kind_of_method_runs(method: str) -> None:
    both(shared(), drop_in.generate(method), **GREEDY)


@pytest.mark.parametrize("method", ["draft-model", "best-first"])
def test_a_draft_in_memory_saves_passes(method: str) -> None:
    loop = drop_in.generate(method, draft=noisy(), num_draft_tokens=4)
    both(shared(), loop, **GREEDY)
    assert all(stats.tokens_per_pass > 1.5 for stats in loop.stats)


def test_trained_heads_on_a_model_in_memory() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
    loop = drop_in.generate("eagle3", heads=bundled_path("heads/eagle3"), num_draft_tokens=4)
    prompt = torch.tensor([[1, 40, 50, 60]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, custom_generate=loop), expected)
    assert loop.stats[0].num_drafted > 0


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

    for processor, reason in ((Counting(), "Counting gives two answers"), (Mixing(), "Mixing looks at other rows")):
        processors = LogitsProcessorList([processor])  # type: ignore[list-item]
        with pytest.raises(OptionError, match=reason):
            shared().generate(RAGGED, **GREEDY, logits_processor=processors, custom_generate=drop_in.generate())


def test_a_criterion_that_remembers_or_mixes_rows_is_refused_by_name() -> None:
    asked = iter(range(1000))

    def every_other(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), next(asked) % 2 == 1)

    def any_row(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (ids[:, 0] == 3).any().expand(len(ids))

    for criterion, reason in ((every_other, "every_other gives two answers"), (any_row, "any_row looks at other rows")):
        criteria = StoppingCriteriaList([criterion])  # type: ignore[list-item]
        with pytest.raises(OptionError, match=reason):
            shared().generate(RAGGED, **GREEDY, stopping_criteria=criteria, custom_generate=drop_in.generate())


def test_the_seed_of_torch_fixes_sampled_text_whatever_the_method() -> None:
    texts = []
    loops = [drop_in.generate("plain"), drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=4)]
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
    prompts = Prompts.of(RAGGED, {"attention_mask": MASK})
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
    loop = drop_in.generate("draft-model", draft=noisy(), num_draft_tokens=1)
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


def test_attach_and_detach() -> None:
    model = random_model("llama")
    expected = model.generate(RAGGED, **GREEDY)
    loop = drop_in.attach(model, "suffix", num_draft_tokens=4)
    assert torch.equal(model.generate(RAGGED, GenerationConfig(max_new_tokens=12), attention_mask=MASK), expected)
    assert len(loop.stats) == 3
    again = drop_in.attach(model, "prompt-lookup")
    assert torch.equal(model.generate(inputs=RAGGED, **GREEDY), expected) and len(again.stats) == 3
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model is as it was"
    copied = copy.deepcopy(model)
    drop_in.detach(model)
    assert "generate" not in vars(model) and torch.equal(copied.generate(RAGGED, **GREEDY), expected)
    with pytest.raises(OptionError, match="nothing is attached"):
        drop_in.detach(model)


def test_a_pipeline_and_stop_strings() -> None:
    words = {**{f"w{number}": number for number in range(VOCAB - 1)}, "abcdef": VOCAB - 1}  # transformers joins tokens to it
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), pad_token="w0", eos_token="w2", padding_side="left"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    model = copy.deepcopy(shared())
    writes = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    prompts, options = ["w5 w6 w7 w5 w6", "w8 w9"], {"max_new_tokens": 12, "do_sample": False}
    expected = writes(prompts, **options)
    word = expected[0][0]["generated_text"].split()[8]
    loop = drop_in.attach(model, "suffix", num_draft_tokens=4)
    assert writes(prompts, **options) == expected and loop.stats
    ids = tokenizer(prompts, return_tensors="pt", padding=True)
    ending: dict[str, Any] = {"stop_strings": [word], "tokenizer": tokenizer, **options}
    found = model.generate(**ids, **ending)
    drop_in.detach(model)
    assert torch.equal(found, model.generate(**ids, **ending)) and int((found[0, 5:] == 0).sum()) < 8


def test_a_resized_model_is_opened_again() -> None:
    model, loop = random_model("llama"), drop_in.generate()
    both(model, loop, **GREEDY)
    model.resize_token_embeddings(60)
    both(model, loop, **GREEDY)


@pytest.mark.parametrize("as_checkpoint", [False, True])
def test_a_folder_as_the_hub_expects_it(as_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = drop_in.write_folder(tmp_path / "repo", "suffix", num_draft_tokens=4)
    assert sorted(path.name for path in folder.iterdir()) == ["generate.py", "requirements.txt"]
    expected = shared().generate(RAGGED, **GREEDY)
    # the package under test may run from its source tree, where no requirement can be found
    monkeypatch.setattr("transformers.generation.utils.check_python_requirements", lambda *_, **__: None)
    if as_checkpoint:
        shared().save_pretrained(tmp_path / "repo")
        options: dict[str, Any] = {"trust_remote_code": True, "attn_implementation": "eager"}
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "repo", **options)
        assert "generate" in vars(model) and torch.equal(model.generate(RAGGED, **GREEDY), expected)
    else:
        found = shared().generate(RAGGED, **GREEDY, custom_generate=str(folder.parent), trust_remote_code=True)
        assert torch.equal(found, expected)
    with pytest.raises(OptionError, match="draft"):
        drop_in.write_folder(tmp_path, "draft-model", draft=noisy())
