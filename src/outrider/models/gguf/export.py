"""A model folder as a GGUF file for llama.cpp: a draft model that was trained here drafts there (``--model-draft``).

What ``convert.py`` undoes is done here, for the families in which nothing else differs: llama (rotary pairs stand next to each
other), qwen2 and qwen3. The tokenizer must be a byte-level BPE that splits words in one of the ways that llama.cpp has a name
for. This is tested on sample texts, because a wrong name would split some words differently without an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.core.errors import ModelError, OptionError, nearest
from outrider.models.gguf.families import BLOCK_NAMES, FAMILIES, QK_NORM_NAMES, TOP_NAMES
from outrider.models.gguf.reader import read_gguf
from outrider.models.gguf.tokenizer import SPLITTINGS, gguf_tokenizer
from outrider.models.gguf.writer import write_gguf
from outrider.models.quantised.folder import checkpoint
from outrider.models.weights import TensorSource

WRITABLE = ("llama", "qwen2", "qwen3")
TYPES = {"float32": (torch.float32, 0), "float16": (torch.float16, 1), "bfloat16": (torch.bfloat16, 32)}
"""How matrices are stored, and llama.cpp's number for a file of them."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_PROBES = (
    "Once upon a time, in 1987, there were 12,345 cats; weren't there?",
    "def f(x_1):\n    return x_1 ** 2  # squared\n\n\n",
    "\u00dcber \u00e9t\u00e9 \u6f22\u5b57\u304b\u306a \u0440\u0443\u0441\u0441\u043a\u0438\u0439 e\u0301",
    "I'LL   do\tit\r\n don't!!",
    "HTTPServer2 CamelCase4you 3.14159 1000000 !?...",
)


def export_gguf(folder: Path, out: Path, *, raw: Mapping[str, Any], dtype: str = "float16") -> None:
    """Write the model of a folder with this ``config.json``."""
    family = str(raw.get("model_type"))
    if family not in WRITABLE:
        raise OptionError(f"a model of type {family!r} cannot be written as GGUF here; {nearest(family, WRITABLE)}")
    if dtype not in TYPES:
        raise OptionError(f"unknown dtype {dtype!r} of a GGUF file; {nearest(dtype, TYPES)}")
    check_rotary(raw)
    tensors = dict(_tensors(checkpoint(folder, raw), raw, TYPES[dtype][0]))
    keys = {**_keys(folder, raw), "general.file_type": TYPES[dtype][1]}
    write_gguf(out, {**keys, **vocabulary(folder, out, keys, vocab_size=int(raw["vocab_size"]))}, tensors)


def check_rotary(raw: Mapping[str, Any]) -> None:
    """Refuse rotary embeddings that would need factors in the file."""
    if raw.get("rope_scaling") or (raw.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        raise OptionError("a model with rotary scaling cannot be written as GGUF here; use llama.cpp's own converter")


def _keys(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    family = str(raw["model_type"])
    named = {f"{family}.{name}": value for name, value in shape_keys(raw).items()}
    return {"general.architecture": family, "general.name": folder.name, **named}


def shape_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a decoder, by llama.cpp's names without the architecture before them."""
    num_heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // num_heads)
    theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    return {
        "vocab_size": int(raw["vocab_size"]),
        "context_length": int(raw["max_position_embeddings"]),
        "embedding_length": int(raw["hidden_size"]),
        "block_count": int(raw["num_hidden_layers"]),
        "feed_forward_length": int(raw["intermediate_size"]),
        "attention.head_count": num_heads,
        "attention.head_count_kv": int(raw.get("num_key_value_heads") or num_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(theta),
    }


def _tensors(source: TensorSource, raw: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under llama.cpp's name. Norms and biases stay float32, as llama.cpp wants them."""
    names = {theirs: ours for ours, theirs in (TOP_NAMES | BLOCK_NAMES | QK_NORM_NAMES).items()}
    num_heads = int(raw["num_attention_heads"])
    heads = {"attn_q": num_heads, "attn_k": int(raw.get("num_key_value_heads") or num_heads)}
    adjacent = FAMILIES[str(raw["model_type"])].rotary_pairs_adjacent
    for name in sorted(source.names):
        stem, _, kind = name.rpartition(".")
        layer, inner = _place(stem)
        if inner not in names:
            raise ModelError(
                f"{source.origin}: tensor {name!r} has no name in a GGUF file; correct model_type = {raw['model_type']!r}"
            )
        short = names[inner]
        if short == "output" and raw.get("tie_word_embeddings"):
            continue
        tensor = source.read(name)
        if adjacent and short in heads:
            tensor = join_rotary_pairs(tensor, heads[short])
        wide = tensor.dim() == 1
        yield f"{'' if layer is None else f'blk.{layer}.'}{short}.{kind}", tensor.to(torch.float32 if wide else dtype)


def _place(stem: str) -> tuple[str | None, str]:
    """A layer's number, and the name inside it."""
    if not stem.startswith("model.layers."):
        return None, stem
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    return number, inner


def join_rotary_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from [2, d/2] to [d/2, 2]."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def vocabulary(folder: Path, out: Path, keys: Mapping[str, Any], *, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's keys."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise OptionError(
            f"{folder} has no tokenizer.json, and llama.cpp wants the tokenizer in the file; put the target's there"
        )
    described = json.loads(path.read_text(encoding="utf-8"))
    if described["model"]["type"] != "BPE" or described["model"].get("byte_fallback"):
        raise OptionError(f"{path} is not a byte-level BPE, the one kind that is written here; use llama.cpp's own converter")
    known = _known(described, vocab_size) | _special(folder)
    tokenizer = Tokenizer.from_file(str(path))
    for name in SPLITTINGS:
        if _cuts_alike(tokenizer, out, {**keys, **known, "tokenizer.ggml.pre": name}):
            return {**known, "tokenizer.ggml.pre": name}
    raise OptionError(f"{path} splits words in a way that llama.cpp does not know; use llama.cpp's own converter")


def _known(described: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [_USER_DEFINED] * vocab_size
    for token, number in described["model"]["vocab"].items():
        tokens[number], kinds[number] = token, _NORMAL
    for added in described.get("added_tokens") or ():
        tokens[added["id"]], kinds[added["id"]] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    parts = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "add_bos_token": False}
    return {f"tokenizer.ggml.{name}": value for name, value in parts.items()}


def _special(folder: Path) -> dict[str, Any]:
    """The begin and end tokens of ``config.json``, and the chat template."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = {"bos": raw.get("bos_token_id"), "eos": raw.get("eos_token_id")}
    first = {name: ids[0] if isinstance(ids, list) else ids for name, ids in ends.items() if ids is not None}
    found: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": number for name, number in first.items()}
    settings = folder / "tokenizer_config.json"
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    return {**found, "tokenizer.chat_template": template} if isinstance(template, str) else found


def _cuts_alike(tokenizer: Tokenizer, out: Path, keys: Mapping[str, Any]) -> bool:
    """Whether a file with these keys would tokenize every probe alike."""
    trial = out.with_name(out.name + ".trial")
    try:
        write_gguf(trial, keys, {"token_embd.weight": torch.zeros(1, 1)})
        other = gguf_tokenizer(read_gguf(str(trial)))
        pairs = [(other.encode(text).ids, tokenizer.encode(text, add_special_tokens=False).ids) for text in _PROBES]
        return all(theirs == ours for theirs, ours in pairs)
    finally:
        trial.unlink(missing_ok=True)
