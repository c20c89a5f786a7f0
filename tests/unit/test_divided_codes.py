"""Matrices that stay as stored, divided between two gloo processes: the scores of one, with experts too."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_stored_gguf
import torch
from divided import checkpoint
from safetensors.torch import load_file
from test_decoder_families import make_checkpoint
from test_gguf import _byte_level, write_gguf
from test_gguf_experts import SHAPE, as_converted, coded
from test_quantised_stored import folder_of
from test_stored_gguf import Q4_K_M, Shape, model_file

from outrider import LLM, OptionError, SamplingParams
from outrider.core.tree import TokenTree
from outrider.models import parallel
from outrider.models.load import lean_config
from outrider.models.native.build import can_build
from outrider.models.packed import codes_and_scales, pack, part_in_eight
from outrider.models.parallel import ParallelTarget
from outrider.models.parallel.rank import ByHeads
from outrider.models.parallel.units import kept_by_auto, units_of
from outrider.models.source import Source
from outrider.models.stored_rows import from_input

PROMPTS = [[5, 9, 11, 3], [40, 41], [8, 8, 9, 8, 8]]
PARAMS = [SamplingParams(max_tokens=8, ignore_eos=True, **more) for more in ({}, {"temperature": 0.9, "seed": 4}, {})]
pytestmark = pytest.mark.skipif(not can_build(), reason="stored matrices are divided by the native pass")


def experts_file(folder: Path) -> str:
    """A mixture of experts in codes, all experts chosen: rounding moves no choice."""
    changes = {"num_local_experts": 4, "sliding_window": None, "intermediate_size": 128, "num_experts_per_tok": 2}
    make_checkpoint(folder, "mixtral", {**SHAPE, **changes})
    keys = {
        **{"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 1e6},
        **{"expert_count": 4, "expert_used_count": 4, "attention.layer_norm_rms_epsilon": 1e-5},
    }
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in keys.items()} | _byte_level()
    converted = as_converted(load_file(folder / "model.safetensors"), pairs=True)
    tensors = {name: coded(name, tensor, "Q8_0") for name, tensor in converted.items()}
    return str(write_gguf(folder / "codes.gguf", metadata, tensors))


def model_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A model whose shares are whole blocks, and the type it is opened in."""
    if kind.startswith("experts, "):
        changes = {"model_type": "mixtral", "attention_bias": False, "mlp_bias": False, "sliding_window": None}
        changes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "head_dim": 32}
        return checkpoint(folder / "rounded", **changes), kind.removeprefix("experts, ")
    if kind == "experts":
        (folder / "experts").mkdir()
        return experts_file(folder / "experts"), "stored"
    if kind in ("gptq", "gptq-symmetric", "awq", "gptq-8bit"):
        return folder_of(folder / kind, kind), "stored"
    monkeypatch.setattr(test_stored_gguf, "SMALL", Shape(128, 192, 8, 2))
    monkeypatch.setattr(test_stored_gguf, "LARGE", Shape(512, 1024, 32, 4))
    kinds = Q4_K_M if kind == "Q4_K_M" else {"": kind, "ffn_down": "Q5_1", "token_embd": "Q8_0"}
    return str(model_file(folder, kinds, "llama" if kind == "Q4_0" else "qwen2")), "stored"


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_K_M", "Q8_0", "gptq", "gptq-symmetric", "gptq-8bit", "awq", "experts", "experts, w8a8", "experts, int8"],
)
def test_two_processes_say_what_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Scores of one process, up to the rounding of a sum over ranks: it may move an input of 8 bits by one step. The text of
    speculation is that of plain decoding on the same ranks."""
    name, dtype = model_of(kind, tmp_path, monkeypatch)
    alone = LLM(name, method="plain", dtype=dtype, device="cpu")
    apart = LLM(name, method="prompt-lookup", dtype=dtype, device="cpu", tensor_parallel=2)
    assert isinstance(apart.target, ParallelTarget)
    try:
        chain = TokenTree.chain(torch.arange(5, 25)[None], [20])
        scores = [llm.target.score(chain, llm.target.new_cache(1)).logits for llm in (alone, apart)]
        assert (scores[0] - scores[1]).abs().mean() < 0.01 * scores[0].std()
        outputs = [apart.generate(PROMPTS, PARAMS, method=method) for method in ("plain", "prompt-lookup")]
        assert [list(out.token_ids) for out in outputs[0]] == [list(out.token_ids) for out in outputs[1]]
    finally:
        apart.target.team.close()


def test_a_row_begins_some_blocks_later() -> None:
    table = torch.tensor([[100, 2], [500, 6]])  # Q4_0 has 18 bytes for 32 weights, Q4_K 144 for 256
    assert from_input(table, 256).tolist() == [[100 + 8 * 18, 2], [500 + 144, 6]]


def test_a_part_in_eight_bits_is_one_of_the_rounded_matrix() -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = pack(weight, 8)
    for begin, end in ((0, 32), (32, 96)):
        codes, scales = codes_and_scales(part_in_eight(weight[:, begin:end], weight))
        assert torch.equal(codes, whole.data[:, begin:end]) and torch.equal(scales, whole.scales[0].float())


def test_blocks_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="its heads do not come in groups of 256 for every rank"):
        LLM(str(model_file(tmp_path, Q4_K_M)), method="plain", dtype="stored", device="cpu", tensor_parallel=2)
    plain = checkpoint(tmp_path / "floats")
    with pytest.raises(OptionError, match="its matrices are not stored in blocks"):
        LLM(plain, method="plain", dtype="stored", device="cpu", tensor_parallel=2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_refuse_columns_in_another_order(tmp_path: Path, device: str) -> None:
    path, place = Path(folder_of(tmp_path / "m", "gptq-act-order")), torch.device(device)
    assert not kept_by_auto(path, place)
    with pytest.raises(OptionError, match="with act-order, a rank's inputs are not whole groups; use 'bfloat16'"):
        units_of(path, lean_config(path), 2, "stored", place, fast=True)


def test_a_quantised_checkpoint_stays_so_unless_its_groups_would_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``dtype="auto"`` keeps what one process keeps."""
    opened = list[ByHeads]()
    monkeypatch.setattr(parallel, "ParallelTarget", opened.append)
    parallel.load_parallel(Source(folder_of(tmp_path / "gptq", "gptq")), 2, device="cpu")
    parallel.load_parallel(Source(checkpoint(tmp_path / "floats")), 2, device="cpu")
    with pytest.warns(UserWarning, match="is dequantised, since it cannot be divided.*groups of 256"):
        parallel.load_parallel(Source(str(model_file(tmp_path, Q4_K_M))), 2, device="cpu")
    assert [opening.dtype for opening in opened] == ["stored", None, "auto"]
    assert [opening.unit for opening in opened] == [32, 1, 1]
