"""Matrices that stay as a GGUF file stores them, for the native CPU pass, which packs and multiplies them.

A stored matrix is a table of its rows, int64 [out, 2]: where a row begins in the file, and the number of its storage type. An
output is still a row, so rows are joined and reordered as those of any matrix, and nothing is copied until they are packed. The
types in ``STORED`` stay, in the embedding too, and so do floats of 16 bits; matrices of other types are dequantised. Matrices
that the decoder joins (query, key and value; gate and up) may differ in type, but either all of them stay as stored or none.
Floats are joined only with floats of the same type.

``multiply`` is the arithmetic of the native pass in PyTorch, the reference it is tested against. Inputs are rounded to 8 bits,
32 at a time with a scale of their own. So does llama.cpp, except that it rounds 256 at a time for the K types.
``multiply_in_halves`` is that of F16 matrices on processors that add numbers of 16 bits.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.decoder_weights import STORED_ROWS
from outrider.models.gguf.convert import hf_names, hf_tensors
from outrider.models.gguf.quants import STORAGE_TYPES, dequantise
from outrider.models.gguf.reader import GGUFFile, TensorEntry
from outrider.models.weights import TensorSource

SPAN = 32
"""Inputs that are rounded together."""
_FIRST = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
NUMBERS = {name: 1 + number for number, name in enumerate(_FIRST)} | {"MXFP4": 19}
"""The numbers of quantised types in ``native/stored_types.hpp``."""
STORED = tuple(NUMBERS)
"""Quantised types that stay."""
FLOATS = {"F16": 14, "BF16": 15}
"""Floats of 16 bits, and their numbers there. Scores are those of float32, but for F16 on processors that add in 16 bits."""
KEPT = (*STORED, *FLOATS)
"""Types whose matrices a CPU keeps as stored."""
EMBEDDING = "token_embd.weight"
ROUTER = "ffn_gate_inp.weight"
_BY_NAME = {storage.name: storage for storage in STORAGE_TYPES.values()}
_JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps"))


@final
class StoredTensors(TensorSource):
    """The tensors of a GGUF file under their Hugging Face names, with matrices as tables of their rows where they stay."""

    def __init__(
        self, file: GGUFFile, tables: Mapping[str, Tensor], *, instead: str = "float32", stay: Collection[str] = KEPT
    ) -> None:
        """``tables`` by names of the file. Other matrices are multiplied in ``instead``, which a warning says."""
        names = hf_names(file)
        self.origin = str(file.path)
        self._shapes = {each: file.tensors[name].shape[-2:] for name in tables for each in names[name]}
        self._tensors = dict(hf_tensors(file, stored=tables))
        file.forget(0, len(file.data))
        _say_what_is_dequantised(file, tables, instead, stay)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._shapes:
            return super().take(name, *shape)
        self.check_shape(name, self._shapes[name], shape)
        return self._tensors[name]


def row_table(entry: TensorEntry) -> Tensor:
    """The rows of one matrix, or of all experts' matrices: offset in the file, and number of the type."""
    *rows, row_len = entry.shape
    begins = entry.start + entry.storage.num_bytes(row_len) * torch.arange(math.prod(rows), dtype=STORED_ROWS)
    name = entry.storage.name
    found = torch.stack((begins, torch.full_like(begins, FLOATS.get(name) or NUMBERS[name])), 1)
    return found.view(*rows, 2)


def stored_tensors(file: GGUFFile) -> StoredTensors:
    """The tensors for a CPU, which reads the rows of matrices where they lie in the file."""
    return StoredTensors(file, {name: row_table(file.tensors[name]) for name in stored_matrices(file)})


def stored_matrices(file: GGUFFile) -> frozenset[str]:
    """Names, as in the file, of the matrices that stay as they are."""
    matrices = [name for name, entry in file.tensors.items() if is_matrix(entry)]
    return frozenset(name for name in matrices if _stay(_types_beside(file, name)))


def is_matrix(entry: TensorEntry) -> bool:
    """Whether the tensor is a matrix, or all experts' matrices of a layer. Routers are not; they stay floats."""
    return len(entry.shape) >= 2 and entry.name.endswith(".weight") and not entry.name.endswith(ROUTER)


def is_fast_as_stored(file: GGUFFile, *, floats: Collection[str]) -> bool:
    """Whether every matrix of the file stays as stored and gains by it: it is quantised, or of one of those ``floats`` that the
    processor multiplies best as they are."""
    gaining = (*STORED, *floats)
    kinds = {name: entry.storage.name for name, entry in file.tensors.items() if is_matrix(entry)}
    return all(kind in gaining and _stay(_types_beside(file, name)) for name, kind in kinds.items())


def _stay(types: set[str]) -> bool:
    """Whether matrices of these types can be joined as they are."""
    return types <= set(STORED) or (len(types) == 1 and types <= FLOATS.keys())


def _types_beside(file: GGUFFile, name: str) -> set[str]:
    """Storage types of the matrix and of those it is joined with."""
    before, _, stem = name.removesuffix(".weight").rpartition(".")
    joined = next((group for group in _JOINED if stem in group), (stem,))
    names = [f"{before}.{other}.weight" if before else f"{other}.weight" for other in joined]
    return {file.tensors[other].storage.name for other in names if other in file.tensors}


def _say_what_is_dequantised(file: GGUFFile, kept: Collection[str], instead: str, stay: Collection[str]) -> None:
    entries = [entry for name, entry in file.tensors.items() if is_matrix(entry) and name not in kept]
    tied = "output.weight" not in file.tensors
    others = Counter(entry.storage.name for entry in entries if entry.name != EMBEDDING or tied)
    if others:
        found = ", ".join(f"{count} of {name}" for name, count in sorted(others.items()))
        what = f"{file.path}: {found} among its matrices are multiplied in {instead}; {', '.join(stay)} stay as stored"
        warnings.warn(what, stacklevel=4)


def multiply(inputs: Tensor, rows: Tensor, name: str) -> Tensor:
    """[N, out] float64: float32 ``inputs`` [N, in], rounded, times the rows of a file [out, bytes], of the type called
    ``name``, without further rounding."""
    weights = dequantise(rows.contiguous().numpy().reshape(-1), _BY_NAME[name]).view(len(rows), -1)
    return rounded(inputs).double() @ weights.double().T


def rounded(inputs: Tensor) -> Tensor:
    """[..., in] float64: float32 ``inputs`` as whole numbers up to 127 times a scale of 22 bits for every 32."""
    spans = inputs.unflatten(-1, (-1, SPAN))
    scale = spans.abs().amax(-1, keepdim=True) / 127
    scale = ((scale.view(torch.int32) + 3) & ~3).view(torch.float32)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((spans * inverse).round().double() * scale.double()).flatten(-2)


def multiply_in_halves(inputs: Tensor, weights: Tensor) -> Tensor:
    """[N, out] float32: float32 ``inputs`` [N, in] times float16 ``weights`` [out, in], bit for bit as in ``half_sums.hpp``.

    Inputs are rounded to 16 bits, 32 at a time, after a power of two has brought their largest between 2 and 4. Products of
    even and of odd inputs are a chain of additions in 16 bits each, and the sum of both is added to a float."""
    padding = (0, -inputs.shape[1] % SPAN)
    spans, rows = (F.pad(each, padding).unflatten(1, (-1, SPAN)) for each in (inputs, weights))
    exponents = ((spans.abs().amax(-1).view(torch.int32) >> 23) - 128).clamp(-100, 100)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    short, total = (spans / scales.unsqueeze(-1)).half().double(), inputs.new_zeros(len(inputs), len(weights))
    for span in range(spans.shape[1]):
        products = short[:, None, span] * rows[None, :, span].double()
        chains = products[..., :2]
        for first in range(2, SPAN, 2):
            chains = _in_halves(chains) + products[..., first : first + 2]
        total += _in_halves(_in_halves(chains).sum(-1)).float() * scales[:, span, None]
    return total


def _in_halves(sums: Tensor) -> Tensor:
    """The numbers in 16 bits, rounded once; PyTorch would round to 32 bits first."""
    return torch.from_numpy(sums.numpy().astype(np.float16)).double()
