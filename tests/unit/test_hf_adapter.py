"""Any Hugging Face model through the adapter: trees get the logits of their unrolled sequences, or the model is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.core.errors import ModelError
from outrider.core.tree import TokenTree
from outrider.models.hf import HFModel
from outrider.models.load import load_model

VOCAB = 53
SIZES = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "opt": (
        "opt",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
        },
    ),
    "gpt_neox": ("gpt_neox", {**LLAMA, "max_position_embeddings": 64}),
    "mistral-window": ("mistral", {**LLAMA, "sliding_window": 5}),
    "gemma2-two-masks": ("gemma2", {**LLAMA, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}),
}
PROMPTS = [[5, 9, 33, 2, 17, 8, 44, 21, 3], [7, 7, 12], [50, 4, 29, 30, 31]]


def random_model(model_type: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def ours(request: pytest.FixtureRequest) -> HFModel:
    return HFModel(random_model(*MODELS[request.param]))


def reference(ours: HFModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return ours.model(torch.tensor([tokens])).logits[0]


def random_tree(rng: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    parents = [-1, *sorted(rng.randrange(node) for node in range(1, num_nodes))]
    return [rng.randrange(VOCAB) for _ in range(num_nodes)], parents


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_rounds_of_ragged_trees(ours: HFModel) -> None:
    rng = random.Random(0)
    cache = ours.new_cache(3)
    ours.prefill(PROMPTS, cache)
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(3):
        trees = [random_tree(rng, rng.randrange(1, 7)) for _ in texts]
        tree = TokenTree.of_rows(trees)
        logits = ours.score(tree, cache).logits
        assert logits.isfinite().all()
        for row, (tokens, _) in enumerate(trees):
            for node in range(tree.sizes[row]):
                path = [tokens[n] for n in (0, *tree.path(row, node))]
                close(logits[row, node], reference(ours, texts[row] + path)[-1])
        paths = [[0, *tree.path(row, rng.randrange(tree.sizes[row]))] for row in range(3)]
        cache.commit(paths)
        for text, path, (tokens, _) in zip(texts, paths, trees, strict=True):
            text += [tokens[node] for node in path]
        assert cache.lengths == [len(text) for text in texts]


def test_commits_leave_the_cache_of_a_fresh_prefill(ours: HFModel) -> None:
    cache, fresh = ours.new_cache(2), ours.new_cache(2)
    ours.prefill(PROMPTS[:2], cache)
    ours.score(TokenTree.of_rows([([1, 2, 3, 4], [-1, 0, 0, 2])] * 2), cache)
    cache.commit([[0, 2, 3], [0]])
    ours.prefill([[*PROMPTS[0], 1, 3, 4], [*PROMPTS[1], 1]], fresh)
    for pair in zip(cache.blocks, fresh.blocks, strict=True):
        for left, right in zip(*pair, strict=True):
            for row, length in enumerate(cache.lengths):
                close(left[row, :, :length], right[row, :, :length])


def test_a_chain_moves_nothing_and_scores_again_after_a_rejection(ours: HFModel) -> None:
    cache = ours.new_cache(1)
    ours.prefill([PROMPTS[0]], cache)
    ours.score(TokenTree.chain(torch.tensor([[6, 7, 8, 9]])), cache)
    ours.score(TokenTree.chain(torch.tensor([[6, 7, 11]])), cache)
    cache.commit([[0, 1]])
    assert cache.num_slots == cache.lengths[0] == len(PROMPTS[0]) + 2
    logits = ours.score(TokenTree.chain(torch.tensor([[12]])), cache).logits
    close(logits[0], reference(ours, [*PROMPTS[0], 6, 7, 12])[-1:])


def test_a_tree_grown_level_by_level(ours: HFModel) -> None:
    parents, tokens = [-1, 0, 0, 1, 2, 2], [6, 7, 8, 9, 10, 11]
    whole, cache = ours.new_cache(2), ours.new_cache(2)
    for each in (whole, cache):
        ours.prefill(PROMPTS[:2], each)
    expected = ours.score(TokenTree.of_rows([(tokens, parents)] * 2), whole).logits
    ours.score(TokenTree.of_rows([(tokens[:3], parents[:3])] * 2), cache)
    found = ours.score(TokenTree.of_rows([(tokens, parents)] * 2), cache, start=3).logits
    close(found, expected[:, 3:])


def test_fork_join_truncate(ours: HFModel) -> None:
    caches = [ours.new_cache(1) for _ in PROMPTS]
    for prompt, cache in zip(PROMPTS, caches, strict=True):
        ours.prefill([prompt], cache)
    joined = ours.new_cache(1).join(caches[0]).join(caches[1]).join(caches[2]).fork([3, 1, 1])
    joined.truncate([len(PROMPTS[2]), 4, len(PROMPTS[0])])
    logits = ours.score(TokenTree.chain(torch.tensor([[6], [9], [10]])), joined).logits
    close(logits[0], reference(ours, [*PROMPTS[2], 6])[-1:])
    close(logits[1], reference(ours, [*PROMPTS[0][:4], 9])[-1:])
    close(logits[2], reference(ours, [*PROMPTS[0], 10])[-1:])


def test_taps_and_readout(ours: HFModel) -> None:
    taps = (0, 1, ours.num_layers)
    cache = ours.new_cache(2)
    tapped = ours.prefill(PROMPTS[:2], cache, taps=taps)
    scores = ours.score(TokenTree.chain(torch.tensor([[3, 4], [3, 4]])), cache, taps=taps)
    for row, prompt in enumerate(PROMPTS[:2]):
        with torch.no_grad():
            output = ours.model(torch.tensor([[*prompt, 3, 4]]), output_hidden_states=True)
        for tap in taps:
            found = torch.cat((tapped[tap][row], scores.taps[tap][row]))
            if tap < ours.num_layers:
                close(found, output.hidden_states[tap][0])
            else:
                close(ours.logits(found), output.logits[0])


def test_a_recurrent_model_is_refused() -> None:
    options = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCAB}
    with pytest.raises(ModelError, match=r"cannot score trees|keeps no keys"):
        HFModel(AutoModelForCausalLM.from_config(CONFIG_MAPPING["mamba"](**options)))


def test_a_model_that_ignores_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(*MODELS["gpt2"])
    forward = model.forward

    def deaf(*, attention_mask: Any = None, **options: Any) -> Any:
        return forward(**options)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(ModelError, match="ignores tree masks or positions"):
        HFModel(model)


def test_a_model_that_ignores_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(*MODELS["gpt_neox"])
    forward = model.forward

    def deaf(*, position_ids: Any = None, **options: Any) -> Any:
        return forward(**options)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(ModelError, match="ignores tree masks or positions"):
        HFModel(model)


def test_layers_of_an_unknown_kind_are_refused() -> None:
    model = random_model("qwen2", LLAMA)
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        HFModel(model)


def test_load_model_takes_the_adapter_for_unknown_families(tmp_path: Path) -> None:
    random_model(*MODELS["gpt2"]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert isinstance(loaded, HFModel) and loaded.dtype == torch.float32 and loaded.vocab_size == VOCAB


def test_a_folder_transformers_cannot_open(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows_this"}')
    with pytest.raises(ModelError, match="transformers cannot open it"):
        load_model(str(tmp_path), device="cpu")
