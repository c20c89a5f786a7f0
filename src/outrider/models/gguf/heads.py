"""EAGLE-3 and DFlash heads as GGUF files for llama.cpp (``llama-server --spec-type draft-eagle3`` and ``draft-dflash``).

llama.cpp gives both architectures of their own. It counts target layers as we do, by what enters them. The tokenizer in the
file is the target's. What differs between the kinds is declared by each (``GgufLayout``). Read from llama.cpp at commit
b21e4de7 (conversion/llama.py, conversion/qwen.py, src/models/eagle3.cpp, src/models/dflash.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.gguf.export import TYPES, check_rotary, join_rotary_pairs, shape_keys, vocabulary
from outrider.models.gguf.families import BLOCK_NAMES, QK_NORM_NAMES
from outrider.models.gguf.writer import write_gguf
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head
from outrider.models.heads.kind import GgufLayout
from outrider.models.heads.kinds import KINDS

_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "fc": "fc", "hidden_norm": "enc.output_norm"}
_BLOCK = {ours: theirs for theirs, ours in (BLOCK_NAMES | QK_NORM_NAMES).items()} | {"hidden_norm": "attn_norm_2"}


def is_heads(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes heads instead of a model."""
    return "kind" in raw.get("outrider", {}) or any(kind.claims(raw) for kind in KINDS.values())


def export_head_gguf(head: Head, out: Path, *, target: Path, dtype: str = "float16") -> None:
    """Write heads for a target, whose folder has the tokenizer."""
    config, layout = head.config, KINDS[head.config.kind].gguf
    if layout is None:
        able = ", ".join(name for name, kind in KINDS.items() if kind.gguf is not None)
        raise OptionError(f"{config.kind} heads have no GGUF format, since llama.cpp cannot run them; use heads of kind {able}")
    if dtype not in TYPES:
        raise OptionError(f"unknown dtype {dtype!r} of a GGUF file; {nearest(dtype, TYPES)}")
    _check(config, layout)
    keys = {**_keys(head, layout), "general.file_type": TYPES[dtype][1]}
    tokens = vocabulary(target, out, keys, vocab_size=config.vocab_size)
    if layout.has_mask:
        tokens["tokenizer.ggml.mask_token_id"] = config.mask_token
    write_gguf(out, {**keys, **tokens}, dict(_tensors(head, layout, TYPES[dtype][0])))


def _check(config: HeadConfig, layout: GgufLayout) -> None:
    check_rotary(config.raw)
    if layout.num_taps and len(config.taps) != layout.num_taps:
        what = f"these {config.kind} heads read {len(config.taps)} target layers"
        raise OptionError(f"{what} and llama.cpp reads {layout.num_taps}; train with as many -O taps=")
    if not layout.reads_top and config.target_layers and config.target_layers in config.taps:
        raise OptionError(
            f"{config.kind} heads that read the last layer's output (layers {list(config.taps)} of {config.target_layers}) "
            "have no GGUF format: llama.cpp reads what enters a layer; train with lower -O taps="
        )


def _keys(head: Head, layout: GgufLayout) -> dict[str, Any]:
    config = head.config
    assert config.layer is not None
    raw = {**config.raw, "head_dim": config.layer.head_dim, "num_hidden_layers": config.num_layers}
    own: dict[str, Any] = {"target_layers": list(config.taps), "target_hidden_size": config.hidden_size}
    own |= {name: say(head) for name, say in layout.keys.items()}
    named = {f"{layout.architecture}.{name}": value for name, value in {**shape_keys(raw), **own}.items()}
    return {"general.architecture": layout.architecture, "general.name": f"{config.kind} draft", **named}


def _tensors(head: Head, layout: GgufLayout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under llama.cpp's name. Norms stay float32."""
    config = head.config
    assert config.layer is not None
    heads = {"attn_q": config.layer.num_heads, "attn_k": config.layer.num_kv_heads}
    state = dict(head.state_dict())
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["embed_tokens.weight"]  # the target's own, of heads whose ends are tied
    for name, tensor in state.items():
        if name == "d2t":
            continue
        stem, _, kind = name.rpartition(".")
        layer, short = _place(stem)
        is_turned = layout.pairs_adjacent and short in heads
        laid = join_rotary_pairs(tensor, heads[short]) if is_turned else tensor
        stored = laid.detach().to("cpu", torch.float32 if laid.dim() == 1 else dtype)
        yield f"{'' if layer is None else f'blk.{layer}.'}{short}.{kind}", stored
    if config.draft_vocab_size != config.vocab_size:
        yield "d2t", head.target_ids.detach().cpu().to(torch.int64)  # tokens themselves, where folders have differences


def _place(stem: str) -> tuple[int | None, str]:
    """The layer a tensor of ours is in, and llama.cpp's name inside it."""
    if stem.startswith("midlayer."):
        return 0, _BLOCK[stem.removeprefix("midlayer.")]
    if stem.startswith("layers."):
        number, _, inner = stem.removeprefix("layers.").partition(".")
        return int(number), _BLOCK[inner]
    return None, _TOP[stem]
