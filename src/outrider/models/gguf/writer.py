"""Writes a GGUF file, which ``reader.py`` reads. Tensors are float32, float16, bfloat16 or int64."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from outrider.models.checkpoint import replace_file
from outrider.models.gguf.quants import STORAGE_TYPES
from outrider.models.gguf.reader import DEFAULT_ALIGNMENT, MAGIC

_VERSION = 3
_CODES = {storage.name: code for code, storage in STORAGE_TYPES.items()}
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}

_U32, _I32 = struct.pack("<I", 4), struct.pack("<I", 5)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace the file, or leave the old one whole. Values are str, bool, int (u32), float (f32) or lists of one kind.
    Whole numbers in lists are i32: llama.cpp refuses token types of any other."""
    replace_file(path, lambda beside: _write(beside, metadata, tensors))


def _write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    head = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    head += [part for key, value in metadata.items() for part in (_string(key), *_typed(value))]
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape
        head.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        head.append(struct.pack("<IQ", _CODES[_NAMES[tensor.dtype]], offset))
        offset += _padded(tensor.nbytes)
    with path.open("wb") as file:
        _put(file, b"".join(head))
        for tensor in tensors.values():
            _put(file, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _put(file: BinaryIO, data: bytes) -> None:
    file.write(data + b"\0" * (_padded(len(data)) - len(data)))


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> tuple[bytes, bytes]:
    """The type code and the bytes of a value."""
    if isinstance(value, list):
        items = [_typed(item) for item in value]
        code = items[0][0] if items else _U32
        code = _I32 if code == _U32 else code
        return struct.pack("<I", 9), code + struct.pack("<Q", len(items)) + b"".join(raw for _, raw in items)
    if isinstance(value, bool):
        return struct.pack("<I", 7), struct.pack("<?", value)
    if isinstance(value, int):
        return _U32, struct.pack("<I", value)
    if isinstance(value, float):
        return struct.pack("<I", 6), struct.pack("<f", value)
    return struct.pack("<I", 8), _string(value)
