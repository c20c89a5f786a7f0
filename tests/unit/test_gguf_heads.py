"""EAGLE-3 and DFlash heads as GGUF: the gguf package and our reader read them, and llama.cpp's arithmetic gives our numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.models.gguf.reader import read_gguf
from outrider.models.heads import Head, load_head, new_head, save_head
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config

TARGET = bundled_path("target")


def rotated(x: Tensor, positions: Tensor, *, adjacent: bool) -> Tensor:
    """[N, heads, D] with rotary embeddings: pairs are neighbours (llama.cpp's NORM) or half a head apart (its NEOX)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    if adjacent:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    turned = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
    return torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)


def new_folder(kind: str, folder: Path, **changes: Any) -> str:
    torch.manual_seed(0)
    raw, ends = read_target(TARGET)
    head = new_head(new_config(kind, raw, **changes), ends)
    save_head(head, folder, dtype=torch.float32)
    return str(folder)


def written(folder: str, out: Path) -> tuple[Head, dict[str, Tensor], dict[str, Any]]:
    """The heads of a folder, and what stands in the file that is made of them."""
    assert main(["export", folder, "gguf", "--target", TARGET, "--out", str(out), "--dtype", "float32"]) == 0
    file = read_gguf(str(out))
    gguf = pytest.importorskip("gguf")
    theirs = gguf.GGUFReader(out)
    assert {tensor.name for tensor in theirs.tensors} == {entry.name for entry in file.tensors.values()}
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in theirs.tensors}
    keys = {name: field.contents() for name, field in theirs.fields.items()}
    return load_head(folder, ends=TARGET, dtype=torch.float32), tensors, keys


def test_eagle3_has_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    head, tensors, keys = written(bundled_path("heads/eagle3"), tmp_path / "eagle3.gguf")
    assert keys["general.architecture"] == "eagle3" and keys["eagle3.block_count"] == 1
    assert keys["eagle3.target_layers"] == list(head.config.taps) == [2, 8, 13]
    assert keys["eagle3.target_hidden_size"] == 256 and keys["eagle3.attention.key_length"] == 64
    assert keys["eagle3.norm_before_residual"] is False and keys["eagle3.norm_before_fc"] is False
    assert len(keys["tokenizer.ggml.tokens"]) == head.config.vocab_size
    assert tensors["fc.weight"].shape == (256, 768) and tensors["output.weight"].shape == (2560, 256)
    assert tensors["blk.0.attn_q.weight"].shape == (256, 512), "embedding and state side by side"
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight"} <= set(tensors)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"], head.target_ids), "tokens themselves, not differences"


def test_eagle3s_layer_in_llama_cpps_arithmetic(tmp_path: Path) -> None:
    """The decoder graph of src/models/eagle3.cpp, restated, on the file's tensors; ours on the folder's."""
    head, gguf, _ = written(bundled_path("heads/eagle3"), tmp_path / "eagle3.gguf")
    own = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    theirs = {name: tensor.reshape(own_shape) for name, tensor in gguf.items() for own_shape in [tensor.shape]}
    tokens, features = torch.tensor([5, 99, 1200, 7]), torch.randn(4, 768, generator=torch.Generator().manual_seed(1))

    def logits(adjacent: bool, get: Any) -> Tensor:
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

        state = features @ get("fc").T
        mixed = torch.cat([norm(get("token_embd")[tokens], get("attn_norm")), norm(state, get("attn_norm_2"))], -1)
        places = torch.arange(4)
        q = rotated((mixed @ get("attn_q").T).view(4, 4, 64), places, adjacent=adjacent)
        k = rotated((mixed @ get("attn_k").T).view(4, 2, 64), places, adjacent=adjacent).repeat_interleave(2, 1)
        v = (mixed @ get("attn_v").T).view(4, 2, 64).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8 + torch.full((4, 4), -torch.inf).triu(1)
        state = state + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(4, -1) @ get("attn_output").T
        x = norm(state, get("ffn_norm"))
        state = state + (torch.nn.functional.silu(x @ get("ffn_gate").T) * (x @ get("ffn_up").T)) @ get("ffn_down").T
        return norm(state, get("output_norm")) @ get("output").T

    inner = {"attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm"}
    inner |= {f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"} | {"attn_output": "self_attn.o_proj"}
    inner |= {f"ffn_{short}": f"mlp.{short}_proj" for short in ("gate", "up", "down")}
    top = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "fc": "fc"}
    ours = {short: own[f"midlayer.{name}.weight"] for short, name in inner.items()}
    ours |= {short: own[f"{name}.weight"] for short, name in top.items()}
    file = {short: theirs[f"blk.0.{short}.weight" if short in inner else f"{short}.weight"] for short in ours}
    assert torch.allclose(logits(True, file.__getitem__), logits(False, ours.__getitem__), atol=1e-4)
    assert not torch.allclose(logits(False, file.__getitem__), logits(False, ours.__getitem__), atol=1e-1), "pairs matter"


def test_dflash_has_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    changes = {"num_heads": 4, "num_layers": 2, "mask_token_id": 3, "taps": [2, 8, 13]}
    folder = new_folder("dflash", tmp_path / "dflash", **changes)
    head, tensors, keys = written(folder, tmp_path / "dflash.gguf")
    assert keys["general.architecture"] == "dflash" and keys["dflash.block_count"] == 2
    assert keys["dflash.block_size"] == 5, "the newest token and four open places"
    assert keys["dflash.target_layers"] == [2, 8, 13] and keys["tokenizer.ggml.mask_token_id"] == 3
    own = head.state_dict()
    pairs = {"fc": "fc", "enc.output_norm": "hidden_norm", "output_norm": "norm", "token_embd": "embed_tokens"}
    pairs |= {f"blk.{n}.attn_q": f"layers.{n}.self_attn.q_proj" for n in (0, 1)}
    pairs |= {f"blk.{n}.attn_k_norm": f"layers.{n}.self_attn.k_norm" for n in (0, 1)}
    for theirs, ours in pairs.items():
        assert torch.equal(tensors[f"{theirs}.weight"], own[f"{ours}.weight"]), theirs
    assert "d2t" not in tensors and torch.equal(tensors["output.weight"], tensors["token_embd.weight"]), "the target is tied"
    assert keys["dflash.attention.key_length"] == tensors["blk.0.attn_q_norm.weight"].numel()


def test_what_llama_cpp_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", bundled_path("heads/medusa"), "gguf", "--out", str(tmp_path / "x.gguf")]) == 2
    assert "medusa heads have no GGUF format" in capsys.readouterr().err
    high = new_folder("dflash", tmp_path / "high", num_heads=4, mask_token_id=3, taps=[0, 8, 16])
    assert main(["export", high, "gguf", "--target", TARGET]) == 2
    assert "llama.cpp reads what enters a layer" in capsys.readouterr().err
    assert main(["export", high, "gguf"]) == 2
    assert "--target MODEL" in capsys.readouterr().err
    assert main(["export", bundled_path("heads/eagle3"), "gguf", "--dtype", "int8", "--out", str(tmp_path / "x.gguf")]) == 2
    assert "unknown dtype 'int8'" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()
