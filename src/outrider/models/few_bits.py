"""A matrix of few bits, in any layout: codes and scales. Joining, picking and cutting such matrices changes no number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from outrider.core.errors import OptionError


class FewBits(ABC):
    """An [out, in] matrix of codes and scales. Its products take it as it is."""

    outputs_at: ClassVar[Mapping[str, int]]
    """For each tensor with a row or a column per output, the dimension of the outputs. The other dimension belongs to
    inputs."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of neighbouring inputs that must stay together."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    @abstractmethod
    def form(self) -> tuple[object, ...]:
        """The properties that matrices must share to be joined into one."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in ``dtype``, or in a float type of its own."""


Few = TypeVar("Few", bound=FewBits)


def joined(pieces: Sequence[Few]) -> Few:
    """Matrices of one form, joined along their outputs."""
    if len(pieces) == 1:
        return pieces[0]
    parts = {name: [each for piece in pieces if (each := vars(piece)[name]) is not None] for name in pieces[0].outputs_at}
    whole = {name: _concatenated(found, pieces[0].outputs_at[name]) for name, found in parts.items() if found}
    return replace(pieces[0], **whole)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]


def picked(matrix: Few, rows: Tensor) -> Few:
    """Some of the outputs, in another order."""
    rows, found = rows.to(matrix.device), dict[str, Tensor]()
    for name, dim in matrix.outputs_at.items():
        tensor: Tensor | None = vars(matrix)[name]
        if tensor is not None:
            found[name] = _bytes(tensor).index_select(dim, rows).view(tensor.dtype).contiguous()
    return replace(matrix, **found)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]


def with_inputs(matrix: Few, begin: int, end: int) -> Few:
    """A range of inputs, for all outputs. Tensors that belong to all inputs stay unchanged."""
    depth, found = matrix.shape[1], dict[str, Tensor]()
    if begin % matrix.unit or end % matrix.unit:
        raise OptionError(f"inputs {begin} to {end} cut {matrix.unit} inputs that must stay together; use 'bfloat16'")
    for name, of_outputs in matrix.outputs_at.items():
        tensor: Tensor | None = vars(matrix)[name]
        if tensor is not None and (length := tensor.shape[1 - of_outputs]) > 1:
            first, last = begin * length // depth, end * length // depth
            found[name] = _bytes(tensor).narrow(1 - of_outputs, first, last - first).contiguous().view(tensor.dtype)
    return replace(matrix, **found)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]


def _concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([_bytes(tensor) for tensor in tensors], dim).view(tensors[0].dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Codes of one byte as plain bytes, which PyTorch can join and pick."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
