"""Quantised matrices that stay quantised on a GPU, in the form that its products take (``packed.py``).

    4 bits             groups of 32, 64 or 128 inputs, with or without zeros; larger groups become groups of 128
    4 bits, a table    likewise without zeros: nf4, fp4
    4 bits, e2m1       experts in groups of 32
    8 bits, whole      a scale per output, or groups of a multiple of 16 inputs; no zeros
    8 bits, e4m3       likewise

No code and no scale changes. With act-order, columns are put in the order of their groups. Matrices with other groups, or
with zeros in 8 bits, are made 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from outrider.models.decoder_weights import STORED_ROWS
from outrider.models.few_bits import FewBits, joined, picked, with_inputs
from outrider.models.packed import GROUP, Packed, Stacked
from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.kept import KeptFolder
from outrider.models.quantised.matrix import Quantised

_SMALL_GROUPS = (32, 64, GROUP)
_GRAIN = 32
"""A rank's inputs are a multiple of this, unless scales need a larger one."""


@final
class PackedRows:
    """Packed matrices by number. A table holds rows of some of them: the row's index, and the matrix's number plus 1."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """``dtype`` is that of the activations."""
        self.dtype = dtype
        self._pieces: dict[int, Callable[[], FewBits]] = {}
        self._count = 0

    def table(self, piece: FewBits) -> Tensor:
        """Keep a matrix."""
        return self.later(piece.shape[0], lambda: piece)

    def later(self, num_outputs: int, make: Callable[[], FewBits]) -> Tensor:
        """Keep a matrix that is made when it is asked for."""
        self._pieces[self._count] = make
        self._count += 1
        rows = torch.arange(num_outputs, dtype=STORED_ROWS)
        return torch.stack((rows, torch.full_like(rows, self._count)), 1)

    def matrix(self, table: Tensor) -> FewBits | Stacked:
        """The matrix of these rows. Its sources are dropped."""
        table = table.cpu().flatten(0, -2)  # of experts one below the other
        pieces = {number: self._pieces.pop(number - 1)() for number in table[:, 1].unique().tolist()}
        forms = {number: piece.form for number, piece in pieces.items()}
        kinds = list(dict.fromkeys(forms.values()))
        kind_of = torch.zeros(max(pieces) + 1, dtype=torch.int64)
        for number, form in forms.items():
            kind_of[number] = kinds.index(form)
        runs = _runs(table, kind_of[table[:, 1]])
        parts = [_rows_of({number: pieces[number] for number in run[:, 1].unique().tolist()}, run) for run in runs]
        return parts[0] if len(parts) == 1 else Stacked(tuple(parts))

    def part(self, table: Tensor, inputs: tuple[int, int] | None = None) -> Tensor:
        """The table of a part. It is on the device of the whole table, because the embedding's device decides which decoder
        runs."""
        matrix = self.matrix(table)
        pieces = matrix.pieces if isinstance(matrix, Stacked) else (matrix,)
        cut = pieces if inputs is None else [with_inputs(piece, *inputs) for piece in pieces]
        return torch.cat([self.table(piece) for piece in cut]).view(table.shape).to(table.device)


def _runs(table: Tensor, kinds: Tensor) -> list[Tensor]:
    """The table in runs of neighbours of one kind."""
    _, lengths = kinds.unique_consecutive(return_counts=True)
    return list(table.split(lengths.tolist()))


def _rows_of(pieces: Mapping[int, FewBits], table: Tensor) -> FewBits:
    """The rows that a table names, of pieces of one form."""
    begins = torch.zeros(max(pieces) + 1, dtype=torch.int64)
    begins[list(pieces)] = torch.tensor([0, *(piece.shape[0] for piece in pieces.values())][:-1]).cumsum(0)
    order, whole = begins[table[:, 1]] + table[:, 0], joined(list(pieces.values()))
    return whole if torch.equal(order, torch.arange(whole.shape[0])) else picked(whole, order)


@final
class PackedFolder(KeptFolder):
    """The tensors of a quantised checkpoint for a GPU."""

    instead = "16 bits"

    def __init__(
        self, folder: QuantisedFolder, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, rounds_inputs: bool = False
    ) -> None:
        """``dtype`` of the activations. With ``rounds_inputs``, e4m3 floats alone are kept, for products that round them."""
        super().__init__(folder)
        self.rows, self._device, self._rounds_inputs = PackedRows(dtype), device, rounds_inputs

    def keep(self, matrices: Mapping[str, Quantised], order: Tensor | None) -> dict[str, Tensor] | None:
        if not all(map(can_pack, matrices.values())) or len({_form(matrix) for matrix in matrices.values()}) > 1:
            return None
        if self._rounds_inputs and not all(meets_floats(name, matrix) for name, matrix in matrices.items()):
            return None
        has_zeros = any(matrix.zeros is not None for matrix in matrices.values())
        columns = None if order is None else order.to(self._device)
        rounds_inputs = self._rounds_inputs and not any(map(is_of_experts, matrices))
        found = {name: packed(matrix, self._device, zeros=has_zeros) for name, matrix in matrices.items()}
        found = {name: replace(each, order=columns, rounds_inputs=rounds_inputs) for name, each in found.items()}
        return {name: self._table(each, matrices[name]) for name, each in found.items()}

    def _table(self, found: Packed, matrix: Quantised) -> Tensor:
        """[out, 2], or [E, 2, out] of experts, whose inputs come first."""
        table = self.rows.table(found)
        return table.unflatten(0, (matrix.num_experts, -1)).transpose(1, 2) if matrix.num_experts else table


def can_pack(matrix: Quantised) -> bool:
    """Whether products on a GPU take the matrix as it is."""
    num_inputs, length = matrix.shape[1], _group_len(matrix)
    if matrix.group_of is not None or num_inputs % length:
        return False
    if matrix.scales.dtype == torch.uint8:
        return matrix.num_experts > 0 and length == _SMALL_GROUPS[0]
    if matrix.bits == 4:
        return length in _SMALL_GROUPS
    return matrix.zeros is None and (length == num_inputs or length % 16 == 0)


def meets_floats(name: str, matrix: Quantised) -> bool:
    """Whether the codes are e4m3 floats that products with inputs of 8 bits take: a scale per output or per 128 inputs, and
    whole units of 128. Experts meet inputs of 16 bits, so any scales will do."""
    fits = matrix.shape[1] % GROUP == 0 and _group_len(matrix) in (GROUP, matrix.shape[1])
    return matrix.is_float and (fits or is_of_experts(name))


def is_of_experts(name: str) -> bool:
    """Whether a tensor's name is that of an expert, or of all experts of a layer."""
    return ".experts." in name


def packed(matrix: Quantised, device: torch.device, *, zeros: bool) -> Packed:
    """The matrix on a device, with a tensor of zeros if wanted, also where all of them are 0."""
    length = _group_len(matrix)
    scales = _regrouped(matrix, matrix.scales, length).to(device)
    if matrix.bits == 8:
        return Packed(matrix.codes.contiguous().to(device), scales)
    groups = (matrix.codes.to(device) + 8).view(torch.uint8).view(matrix.shape[0], -1, length)
    data = (groups[..., : length // 2] | groups[..., length // 2 :] << 4).flatten(1)
    levels = None if matrix.levels is None or scales.dtype == torch.uint8 else matrix.levels.to(device)
    found = matrix.zeros if matrix.zeros is not None else torch.zeros_like(matrix.scales, dtype=torch.int16)
    return Packed(data, scales, _regrouped(matrix, found, length).to(device, torch.bfloat16) if zeros else None, levels)


def unit_of(matrix: Quantised) -> int:
    """Number of neighbouring inputs that must stay together in the packed matrix."""
    return _GRAIN if matrix.bits == 8 and matrix.scales.shape[1] == 1 else _group_len(matrix)


def _group_len(matrix: Quantised) -> int:
    """Inputs of a group: those of the checkpoint, or 128 of a larger one. In 8 bits an output may be one group."""
    num_inputs = matrix.shape[1]
    length = num_inputs if matrix.scales.shape[1] == 1 else matrix.group_len
    is_cut = length % GROUP == 0 and (matrix.bits == 4 or length < num_inputs)
    return GROUP if is_cut else length


def _regrouped(matrix: Quantised, values: Tensor, length: int) -> Tensor:
    """[groups of ``length``, out] from [out, groups]."""
    times = matrix.shape[1] // length // values.shape[1]
    return values.repeat_interleave(times, 1).T.contiguous()


def _form(matrix: Quantised) -> tuple[object, ...]:
    levels = None if matrix.levels is None else tuple(matrix.levels.tolist())
    return matrix.bits, matrix.is_float, _group_len(matrix), matrix.scales.dtype, levels
