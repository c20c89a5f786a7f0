"""The lean decoder and its native twin against transformers, family by family: small random checkpoints, float32, 1e-4."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider import SamplingParams
from outrider.cache.contiguous import ContiguousCache
from outrider.cache.paged import PagedCache
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import Rounds
from outrider.methods import compose
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.info import describe_model
from outrider.models.load import load_model
from outrider.models.native import BUILD, NativeDecoder

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 6.0],
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
BARE_YARN = {key: value for key, value in YARN.items() if key != "rope_theta"}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4}
LATENT |= {"routed_scaling_factor": 1.5, "num_experts_per_tok": 2}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3-multimodal": ("gemma3", {**GEMMA}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 6, "rope_scaling": BARE_YARN}),
    "granite": ("granite", MULTIPLIERS),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 5, "logit_scale": 0.5}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "hidden_size": 64}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 64}),
    "gpt-neox": ("gpt_neox", {"hidden_size": 64}),
    "gpt-neox-in-turn": ("gpt_neox", {"hidden_size": 64, "use_parallel_residual": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **GROUPS, "rope_parameters": LATENT_YARN, "first_k_dense_replace": 1}),
    "glm4-moe-lite": ("glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1}),
    "youtu": ("youtu", LATENT),
    "minicpm3": ("minicpm3", {**LATENT, "v_head_dim": None, "scale_emb": 3, "dim_model_base": 16}),
    "deepseek-v3-biases": (
        "deepseek_v3",
        {**LATENT, **GROUPS, "attention_bias": True, "rope_interleave": False, "first_k_dense_replace": 0},
    ),
}
PROMPTS = [[5, 9, 33, 2, 17, 8, 44, 21, 3, 50, 11], [7, 7, 12], [60, 4, 29, 30, 31, 1, 5]]


@dataclass
class Pair:
    """A checkpoint, and both programs that run it."""

    folder: Path
    theirs: Any
    ours: Decoder | NativeDecoder
    eager: Decoder
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict[tuple[int, ...], Tensor])

    def reference(self, tokens: list[int]) -> Tensor:
        """[len, V] logits of transformers for one plain sequence, asked once for both decoders."""
        if tuple(tokens) not in self.known:
            with torch.no_grad():
                self.known[tuple(tokens)] = self.theirs(torch.tensor([tokens])).logits[0]
        return self.known[tuple(tokens)]


def make_checkpoint(folder: Path, model_type: str, changes: dict[str, Any], **saving: Any) -> Any:
    torch.manual_seed(0)
    options = {**SIZES, **changes}
    if model_type == "gemma3":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=options, vision_config=vision))
    elif model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    else:
        # eager: the fused kernels of some versions leave out the soft cap of attention scores
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**options), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        is_vector = parameter.dim() == 1
        with torch.no_grad():
            parameter.normal_(0, 0.3 if is_vector else 0.25)
            if is_vector and "norm" in name and "gemma" not in model_type:
                parameter.add_(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    model.eval().save_pretrained(folder, **saving)
    return model


WIDE = {"hidden_size": 64}
"""Heads of 16 dimensions, which fill the vectors of the native decoder."""
FILLED_UP = ("llama2", "phi3-longrope")
"""Families whose heads of 8 dimensions are filled up there."""


def kinds() -> list[Any]:
    """Every family on both decoders, with wide heads. ``make test-all`` adds narrow heads, for the plain one."""
    narrow = [pytest.param((name, "narrow"), marks=pytest.mark.exhaustive) for name in FAMILIES if name not in FILLED_UP]
    return [(name, kind) for name in FAMILIES for kind in ("eager", "native")] + narrow


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Pair]:
    """The checkpoint of a family and its plain decoder, made once for both decoders."""

    @functools.cache
    def make(name: str, is_wide: bool) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        model_type, changes = FAMILIES[name]
        theirs = make_checkpoint(folder, model_type, {**changes, **WIDE} if is_wide else changes)
        eager = load_model(str(folder), dtype="float32", device="cpu", fast=False)
        assert isinstance(eager, Decoder)
        return Pair(folder, theirs, eager, eager)

    return make


@pytest.fixture(scope="module", params=kinds(), ids="-".join)
def pair(request: pytest.FixtureRequest, opened: Callable[[str, bool], Pair]) -> Pair:
    name, kind = request.param
    found = opened(name, kind != "narrow" and name not in FILLED_UP)
    if kind != "native":
        return found
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")
    native = load_model(str(found.folder), dtype="float32", device="cpu")
    assert isinstance(native, NativeDecoder)
    return replace(found, ours=native)


def random_tree(rng: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    parents = [-1, *sorted(rng.randrange(node) for node in range(1, num_nodes))]
    return [rng.randrange(VOCAB) for _ in range(num_nodes)], parents


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_plain_sequence(pair: Pair) -> None:
    tokens = PROMPTS[0] + PROMPTS[2]
    scores = pair.ours.score(TokenTree.chain(torch.tensor([tokens])), pair.ours.new_cache(1))
    close(scores.logits[0], pair.reference(tokens))
    assert scores.logits.std() > 0.5, "the test must be able to see a difference"


def test_one_token_at_a_time(pair: Pair) -> None:
    tokens, cache = PROMPTS[0], pair.ours.new_cache(1)
    rows = []
    for token in tokens:
        rows.append(pair.ours.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0, 0])
        cache.commit([[0]])
    close(torch.stack(rows), pair.reference(tokens))


def test_ragged_batch_of_trees(pair: Pair) -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, num_nodes) for num_nodes in (9, 6, 1)]
    cache = pair.ours.new_cache(3)
    pair.ours.prefill(PROMPTS, cache)
    tree = TokenTree.of_rows(trees)
    logits = pair.ours.score(tree, cache).logits
    assert logits.isfinite().all(), "padding nodes must not produce NaN"
    for row, (tokens, parents) in enumerate(trees):
        for leaf in set(range(len(tokens))) - set(parents):  # a plain sequence to each leaf passes every node
            nodes = [0, *tree.path(row, leaf)]
            expected = pair.reference(PROMPTS[row] + [tokens[node] for node in nodes])
            close(logits[row, nodes], expected[-len(nodes) :])


def test_commits_leave_the_cache_of_a_fresh_prefill(pair: Pair) -> None:
    rng = random.Random(2)
    cache = pair.ours.new_cache(3)
    pair.ours.prefill(PROMPTS, cache)
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(3):
        trees = [random_tree(rng, rng.randrange(1, 8)) for _ in texts]
        tree = TokenTree.of_rows(trees)
        pair.ours.score(tree, cache)
        paths = [[0, *tree.path(row, rng.randrange(tree.sizes[row]))] for row in range(3)]
        cache.commit(paths)
        for text, path, (tokens, _) in zip(texts, paths, trees, strict=True):
            text += [tokens[node] for node in path]
    fresh = pair.ours.new_cache(3)
    pair.ours.prefill(texts, fresh)
    assert cache.lengths == fresh.lengths == [len(text) for text in texts]
    for layer in range(pair.ours.num_layers):
        for left, right in zip(cache.entries(layer), fresh.entries(layer), strict=True):
            for row, length in enumerate(cache.lengths):
                close(left[row, :, :length], right[row, :, :length])


def test_taps(pair: Pair) -> None:
    ours, last = pair.ours, pair.ours.num_layers
    taps = (0, 1, last)
    cache = ours.new_cache(3)
    tapped = ours.prefill(PROMPTS, cache, taps=taps)
    scored = ours.score(TokenTree.chain(torch.tensor([[3, 4], [3, 4], [3, 4]])), cache, taps=taps).taps
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = pair.theirs(torch.tensor([[*prompt, 3, 4]]), output_hidden_states=True).hidden_states
        for tap in taps:
            found = torch.cat((tapped[tap][row], scored[tap][row]))
            close(pair.eager._norm(found) if tap == last else found, states[tap][0])


def test_rows_join_and_leave(pair: Pair) -> None:
    ours = pair.ours
    caches = [ours.new_cache(1) for _ in PROMPTS]
    for prompt, cache in zip(PROMPTS, caches, strict=True):
        ours.prefill([prompt], cache)
    joined = caches[0].join(caches[1]).join(caches[2]).fork([2, 0])
    logits = ours.score(TokenTree.chain(torch.tensor([[6, 8], [9, 10]])), joined).logits
    close(logits[0], pair.reference([*PROMPTS[2], 6, 8])[-2:])
    close(logits[1], pair.reference([*PROMPTS[0], 9, 10])[-2:])


def test_old_and_new_spelling_of_the_config_agree(pair: Pair) -> None:
    raw = json.loads((pair.folder / "config.json").read_text())
    assert config_of(raw) == pair.eager.config
    old = raw.get("text_config", raw)
    rope = old.pop("rope_parameters")
    if "full_attention" in rope:
        old["rope_theta"], old["rope_local_base_freq"] = (
            rope[k].pop("rope_theta") for k in ("full_attention", "sliding_attention")
        )
        full = rope["full_attention"]
        old["rope_scaling"] = None if full["rope_type"] == "default" else full
    else:
        old["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
        old["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    old.pop("layer_types", None)
    assert config_of(raw) == pair.eager.config


def test_prefill_in_chunks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.decoder._CHUNK", 4)
    monkeypatch.setattr("outrider.models.native.decoder._CHUNK", 4)
    cache = pair.ours.new_cache(4)
    rows = [PROMPTS[0], [], PROMPTS[1], PROMPTS[2]]
    tapped = pair.ours.prefill(rows, cache, taps=[1])
    assert cache.lengths == [len(row) for row in rows] == [len(states) for states in tapped[1]]
    logits = pair.ours.score(TokenTree.chain(torch.tensor([[5], [6], [7], [8]])), cache).logits
    for row, (prompt, token) in enumerate(zip(rows, (5, 6, 7, 8), strict=True)):
        close(logits[row, 0], pair.reference([*prompt, token])[-1])


def test_a_tree_grown_level_by_level(pair: Pair) -> None:
    tokens, parents = [6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, 2, 2]
    whole, cache = pair.ours.new_cache(3), pair.ours.new_cache(3)
    for each in (whole, cache):
        pair.ours.prefill(PROMPTS, each)
    expected = pair.ours.score(TokenTree.of_rows([(tokens, parents)] * 3), whole).logits
    pair.ours.score(TokenTree.of_rows([(tokens[:3], parents[:3])] * 3), cache)
    found = pair.ours.score(TokenTree.of_rows([(tokens, parents)] * 3), cache, start=3).logits
    close(found, expected[:, 3:])


def test_latent_attention_caches_one_vector_per_token(tmp_path: Path) -> None:
    """The latent and the rotated key, in one block or in pages, whatever the heads are."""
    make_checkpoint(tmp_path, *FAMILIES["deepseek-v3"])
    logits = []
    for page_len in (0, 4):
        model = load_model(str(tmp_path), dtype="float32", device="cpu", fast=False, page_len=page_len)
        cache = model.new_cache(3)
        model.prefill(PROMPTS, cache)
        logits.append(model.score(TokenTree.of_rows([([6, 7, 8], [-1, 0, 0])] * 3), cache).logits)
        assert isinstance(cache, ContiguousCache | PagedCache) and cache.token_bytes == 3 * (24 + 8) * 4
    close(*logits)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_drafted_text_of_latent_models_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Greedy, in a ragged batch, with trees that another layout of the same model drafts."""
    theirs = make_checkpoint(tmp_path, *FAMILIES[name])
    model, draft = (load_model(str(tmp_path), dtype="float32", device="cpu", page_len=page_len) for page_len in (0, 4))
    method = compose(
        "draft-tree", model, draft=draft, options={"branching": (2, 2), "num_draft_tokens": 2, "num_tree_nodes": 6}
    )
    requests = [Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in PROMPTS]
    states = {len(step.state.request.prompt_ids): step.state for step in Rounds(model).run(method, requests)}
    for prompt in PROMPTS:
        with torch.no_grad():
            text = theirs.generate(
                torch.tensor([prompt]), do_sample=False, min_new_tokens=12, max_new_tokens=12, eos_token_id=-1
            )
        assert states[len(prompt)].tokens == text[0].tolist()
        assert states[len(prompt)].stats.num_accepted > 0


def test_longrope_opened_for_a_long_context_uses_the_long_factors(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, *FAMILIES["phi3-longrope"])
    ours = load_model(str(tmp_path), dtype="float32", device="cpu", max_len=64)
    tokens = [(7 * i) % VOCAB for i in range(60)]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits
    assert load_model(str(tmp_path), device="cpu").max_len == 48
    close(ours.score(TokenTree.chain(torch.tensor([tokens])), ours.new_cache(1)).logits, expected)


def test_dynamic_scaling_is_that_of_the_context_it_is_opened_for(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path, *FAMILIES["llama-dynamic"])
    ours = load_model(str(tmp_path), dtype="float32", device="cpu", max_len=96)
    tokens = [(7 * i) % VOCAB for i in range(96)]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits
    close(ours.score(TokenTree.chain(torch.tensor([tokens])), ours.new_cache(1)).logits, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_logits(pair: Pair) -> None:
    """Lengths of every alignment, chains and trees, level and ragged: kernels differ in what they accept."""
    theirs = load_model(str(pair.folder), dtype="float32", device="cuda")
    rng = random.Random(3)
    for length in range(14, 34, 3):
        prompts = [[rng.randrange(VOCAB) for _ in range(length - row * rng.randrange(2))] for row in range(2)]
        for tree in (TokenTree.of_rows([random_tree(rng, 7)] * 2), TokenTree.chain(torch.randint(0, VOCAB, (2, 5)))):
            logits = []
            for model in (pair.ours, theirs):
                cache = model.new_cache(2)
                model.prefill(prompts, cache)
                logits.append(model.score(tree.to(model.device), cache).logits.cpu())
            torch.testing.assert_close(*logits, atol=1e-2, rtol=0)


def test_a_model_that_the_native_pass_does_not_know_takes_the_lean_decoder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", {"head_dim": 8})
    assert isinstance(load_model(str(tmp_path), dtype="float32", device="cpu"), Decoder)
    assert describe_model(str(tmp_path)).cpu_path.startswith("PyTorch's lean decoder: the faster one has no heads of 8")


def test_info_says_why_a_model_goes_through_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    assert describe_model(str(tmp_path)).gpu_path.startswith("fast decoder")
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, reason in (
        ({"model_type": "gpt_j"}, "'gpt_j' is not among"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
        info = describe_model(str(tmp_path))
        assert info.runs_on == "transformers adapter" and reason in info.gpu_path


def test_info_says_which_latents_the_fast_decoder_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *FAMILIES["deepseek-v3"])
    assert "no latents of (24, 8)" in describe_model(str(tmp_path)).gpu_path
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    info = describe_model(str(tmp_path))
    assert info.gpu_path.startswith("fast decoder") and "on a GPU" in info.same_bits
    assert info.cpu_path == "native pass"
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mlp_bias": True}))
    assert "biases beside experts" in describe_model(str(tmp_path)).gpu_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "silu"}, "silu"),
    ],
)
def test_the_first_gemma_says_its_activation_in_two_ways(given: dict[str, str], meant: str) -> None:
    """As transformers reads its files: "gelu" means the tanh form, any other name itself."""
    config = config_of(
        {"model_type": "gemma", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99, **given}
    )
    plain = config_of(
        {
            "model_type": "gemma2",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "vocab_size": 99,
            "hidden_activation": meant,
        }
    )
    assert config is not None and plain is not None
    assert config.activation == plain.activation
