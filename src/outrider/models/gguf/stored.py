"""Matrices that stay as a GGUF file stores them: bytes in blocks of 32 weights, which the native CPU pass multiplies.

A stored matrix is a uint8 tensor [out, in / 32 * bytes of a block]. An output is still a row, so rows are joined and reordered
as those of any matrix. Three storage types stay (``STORED``); matrices of other types are dequantised, and so is the embedding.
Matrices that the decoder joins (query, key and value; gate and up) stay only if they have one type.

``multiply`` is the arithmetic of the native pass in PyTorch, the reference it is tested against: inputs are rounded to 8 bits,
32 at a time with a scale of their own, as llama.cpp does.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import final

import torch
from torch import Tensor

from outrider.models.gguf.convert import hf_tensors
from outrider.models.gguf.quants import STORAGE_TYPES, dequantise
from outrider.models.gguf.reader import GGUFFile
from outrider.models.weights import TensorSource

SPAN = 32
"""Weights of a block."""
STORED = ("Q8_0", "Q4_0", "Q4_1")
"""Types that stay, in the order in which ``native/blocks.hpp`` numbers them, from 1."""
EMBEDDING = "token_embd.weight"
_BY_BYTES = {storage.block_bytes: storage for storage in STORAGE_TYPES.values() if storage.name in STORED}
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))


@final
class StoredTensors(TensorSource):
    """The tensors of a GGUF file under their Hugging Face names, its matrices as stored where that can be."""

    def __init__(self, file: GGUFFile) -> None:
        kept = stored_matrices(file)
        self.origin = str(file.path)
        self._tensors = dict(hf_tensors(file, stored=kept))
        _say_what_is_dequantised(file, kept)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, name: str, *shape: int) -> Tensor:
        rows = self._tensors.get(name)
        if rows is None or rows.dtype != torch.uint8:
            return super().take(name, *shape)
        is_whole = rows.shape[1] * SPAN // shape[1] in _BY_BYTES
        self.check_shape(name, (rows.shape[0], shape[1] if is_whole else rows.shape[1]), shape)
        return rows


def stored_matrices(file: GGUFFile) -> frozenset[str]:
    """Names, as in the file, of the matrices that stay as they are."""
    matrices = [name for name, entry in file.tensors.items() if len(entry.shape) == 2 and name != EMBEDDING]
    return frozenset(name for name in matrices if _types_beside(file, name) in [{stored} for stored in STORED])


def stored_head(file: GGUFFile) -> Tensor | None:
    """The embedding's rows as stored, to multiply with where it is the head, too; None where its type cannot stay."""
    return file.rows(EMBEDDING) if file.tensors[EMBEDDING].storage.name in STORED else None


def _types_beside(file: GGUFFile, name: str) -> set[str]:
    """Storage types of the matrix and of those it is joined with."""
    before, _, stem = name.removesuffix(".weight").rpartition(".")
    joined = next((group for group in _JOINED if stem in group), (stem,))
    names = [f"{before}.{other}.weight" if before else f"{other}.weight" for other in joined]
    return {file.tensors[other].storage.name for other in names if other in file.tensors}


def _say_what_is_dequantised(file: GGUFFile, kept: frozenset[str]) -> None:
    entries = [entry for name, entry in file.tensors.items() if len(entry.shape) == 2 and name not in kept]
    tied = "output.weight" not in file.tensors and stored_head(file) is None
    others = Counter(entry.storage.name for entry in entries if entry.name != EMBEDDING or tied)
    if others:
        found = ", ".join(f"{count} of {name}" for name, count in sorted(others.items()))
        warnings.warn(
            f"{file.path}: {found} among its matrices are multiplied in float32; {', '.join(STORED)} stay as stored",
            stacklevel=4,
        )


def storage_number(rows: Tensor, inputs: int) -> int:
    """The number by which the native pass knows the type of a stored matrix with so many inputs; 0 for a matrix of floats."""
    return 1 + STORED.index(_BY_BYTES[rows.shape[1] * SPAN // inputs].name) if rows.dtype == torch.uint8 else 0


def multiply(inputs: Tensor, rows: Tensor) -> Tensor:
    """[N, out] float64: float32 ``inputs`` [N, in], rounded, times a stored matrix, without further rounding."""
    storage = _BY_BYTES[rows.shape[1] * SPAN // inputs.shape[1]]
    weights = dequantise(rows.contiguous().numpy().reshape(-1), storage).view(len(rows), -1)
    return rounded(inputs).double() @ weights.double().T


def rounded(inputs: Tensor) -> Tensor:
    """[..., in] float64: float32 ``inputs`` as whole numbers up to 127 times a scale for every 32."""
    spans = inputs.unflatten(-1, (-1, SPAN))
    scale = spans.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((spans * inverse).round().double() * scale.double()).flatten(-2)
