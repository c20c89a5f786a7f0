"""The native pass on matrices that a transformers model holds: the bits of packed ones, and the text of ``generate``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny_transformers import GREEDY, LLAMA, PROCESSORS, SIZES, both
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import outrider.transformers as drop_in
from outrider.core.tree import TokenTree
from outrider.models.config import config_of
from outrider.models.hf import HFModel
from outrider.models.hf_check import agrees
from outrider.models.native import NativeDecoder, native_decoder
from outrider.models.native.build import can_build
from outrider.models.native.held import held_decoder
from outrider.models.weights import TensorDict, read_weights
from outrider.transformers.hf_held import Held

pytestmark = pytest.mark.skipif(not can_build(), reason="needs the native pass")
WIDE = {**LLAMA, "hidden_size": 80, "head_dim": 32, "intermediate_size": 48}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "phi3"), WIDE),
    "mistral": {**WIDE, "sliding_window": 5, "head_dim": 16},
    "gemma2": {**WIDE, **GEMMA},
    "gemma3_text": {**WIDE, **GEMMA},
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **options})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.15)
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_packed_matrices(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    config, tensors = config_of(model.config.to_dict()), dict(model.named_parameters())
    assert config is not None
    copies = TensorDict({name: tensor.detach().clone() for name, tensor in tensors.items()})
    packed = native_decoder(config, read_weights(copies, config, dtype=dtype, device=torch.device("cpu")))
    held = held_decoder(config, {name: tensor.detach() for name, tensor in tensors.items()}, family)
    assert packed is not None and held is not None
    assert held.num_bytes == 0 < packed.num_bytes
    found = []
    for decoder in (packed, held):
        cache = decoder.new_cache(2)
        decoder.prefill([[5, 6, 7, 8, 9, 10, 11], [12, 13]], cache)
        tree = TokenTree.of_rows([([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2]), ([6, 7], [-1, 0])], torch.device("cpu"))
        found.append(decoder.score(tree, cache, taps=(1,)))
    assert torch.equal(found[0].logits.to(dtype).float(), found[1].logits), "rounded as the model's own head rounds them"
    assert torch.equal(found[0].taps[1], found[1].taps[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_generate(family: str) -> None:
    model, loop = model_of(family), drop_in.generate("suffix", num_draft_tokens=4)
    both(model, loop, **GREEDY)
    both(model, loop, **GREEDY, **PROCESSORS)
    assert isinstance(Held.of(model).target(model), NativeDecoder)


def test_a_changed_model_is_read_anew() -> None:
    model, loop = model_of("qwen2", torch.bfloat16), drop_in.generate("suffix")
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, custom_generate=loop)
    was = Held.of(model).target(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    assert Held.of(model).target(model) is was  # its matrices are not copied
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    now = Held.of(model).target(model)
    assert isinstance(now, NativeDecoder) and now is not was
    model.to(torch.float32)
    both(model, loop, **GREEDY)


def test_a_model_that_is_not_what_its_class_says_runs_its_own_modules() -> None:
    hooked, replaced, extended = (model_of("llama") for _ in range(3))
    hooked.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    layer = replaced.model.layers[0].mlp
    layer.forward = type(layer).forward.__get__(layer)
    extended.model.layers[0].extra = torch.nn.Linear(2, 2)
    for model in (hooked, replaced, extended, model_of("llama", torch.float64), model_of("llama", head_dim=24)):
        assert isinstance(Held.of(model).target(model), HFModel)


def test_a_model_of_short_numbers_says_that_rounding_may_decide() -> None:
    """Once, whichever pass runs, and not of a draft. Every method gives the same text there, bit for bit."""
    model, hooked = model_of("llama", torch.bfloat16), model_of("llama", torch.bfloat16)
    hooked.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    prompt, options = torch.tensor([[5, 6, 7, 5, 6]]), {"max_new_tokens": 12, "do_sample": False}
    texts = list[list[int]]()
    for one in (model, hooked):
        with pytest.warns(drop_in.RoundingWarning, match="in bfloat16"):
            texts += one.generate(prompt, **options, custom_generate=drop_in.generate("plain")).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error", drop_in.RoundingWarning)
        assert model.generate(prompt, **options, custom_generate=drop_in.generate("suffix")).tolist() == texts[:1]
        both(model_of("llama"), drop_in.generate("draft-model", draft=model_of("llama", torch.bfloat16)), **GREEDY)


def test_layers_of_the_model_can_draft_for_it() -> None:
    """The native pass is a layered decoder, which the model's own modules are not."""
    both(model_of("llama"), drop_in.generate("early-exit", exit_layer=1, num_draft_tokens=2), **GREEDY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_of_the_same_weights_is_told_from_one_of_others(dtype: torch.dtype) -> None:
    """Rounding at other places is no reason to refuse it."""
    model, other = model_of("llama", dtype), model_of("llama", dtype)
    with torch.no_grad():
        other.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    found = list[bool]()
    for one in (model, other):
        config = config_of(one.config.to_dict())
        assert config is not None
        held = held_decoder(config, {name: tensor.detach() for name, tensor in one.named_parameters()}, "a model")
        assert held is not None
        found.append(agrees(held, model))
    assert found == [True, False]
