"""A quantised checkpoint whose matrices stay quantised: a matrix becomes a table of its rows, which are kept elsewhere.

The decoder joins matrices and reorders their rows when it reads them. A table of rows [out, 2] can be joined and reordered like
any matrix, and nothing is copied meanwhile. The rows are kept elsewhere, in the device's own form (``stored.py``,
``packed_rows.py``).
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.matrix import Quantised
from outrider.models.weights import TensorSource

_JOINED = (("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"), ("w1", "w3"))
_FLOATS = ("kv_b_proj", "gate", "router")
"""Matrices that a decoder takes apart, or uses to choose experts: they are read as floats."""


class KeptFolder(TensorSource):
    """The tensors of a quantised checkpoint, matrices as tables of rows where they can be kept."""

    instead: str
    """For the warning: how matrices that cannot be kept are multiplied instead."""

    def __init__(self, folder: QuantisedFolder, *, reorders: bool = True) -> None:
        """With ``reorders``, a product may have its columns in another order than the model has the inputs (act-order)."""
        self.origin, self._folder, self._reorders = folder.origin, folder, reorders
        self._ready: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self._num_dequantised = 0

    @abstractmethod
    def keep(self, matrices: Mapping[str, Quantised], order: Tensor | None) -> dict[str, Tensor] | None:
        """Tables of the rows of matrices that will be joined, with their columns in an ``order``; None where one of them cannot
        be kept."""

    @property
    def names(self) -> frozenset[str]:
        return self._folder.names

    def read(self, name: str) -> Tensor:
        return self._folder.read(name)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._folder.quantised_names or _stem(name) in _FLOATS:
            return super().take(name, *shape)
        if name not in self._ready:
            self._prepare(_beside(name))
        tensor, found = self._ready.pop(name)
        self.check_shape(name, found, shape)
        return tensor

    def warn(self) -> None:
        """Say how many quantised matrices were dequantised after all."""
        if self._num_dequantised:
            total, form = len(self._folder.quantised_names), self._folder.form.title
            found = f"{self._num_dequantised} of {total} quantised matrices ({form})"
            warnings.warn(f"{self.origin}: {found} are multiplied in {self.instead}", stacklevel=4)

    def _prepare(self, names: list[str]) -> None:
        """Matrices that the decoder joins: all of them are kept, or none."""
        quantised, there = self._folder.quantised_names, [name for name in names if name in self.names]
        found = {name: self._folder.matrix(name) for name in there if name in quantised}
        matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
        tables = self.keep(*self._in_order(matrices)) if len(matrices) == len(there) else None
        for name in there:
            if tables is not None:
                self._ready[name] = tables[name], matrices[name].whole_shape
                continue
            whole = self._folder.read(name)
            self._num_dequantised += name in quantised
            self._ready[name] = whole, tuple(whole.shape)

    def _in_order(self, matrices: Mapping[str, Quantised]) -> tuple[Mapping[str, Quantised], Tensor | None]:
        """The matrices with groups of neighbours, and the order of their columns. Unchanged where groups are neighbours, or
        where matrices that will be joined differ."""
        orders = [matrix.order for matrix in matrices.values()]
        order = orders[0] if orders else None
        is_one = order is not None and all(each is not None and torch.equal(each, order) for each in orders)
        if not (self._reorders and is_one) or any("expert" in name for name in matrices):
            return matrices, None
        return {name: matrix.in_order() for name, matrix in matrices.items()}, order


def _beside(name: str) -> list[str]:
    """A matrix and those that the decoder joins it with."""
    if not name.endswith(".weight"):  # all experts of a layer
        return [name]
    stem = _stem(name)
    joined = next((group for group in _JOINED if stem in group), (stem,))
    return [f"{name.removesuffix(f'{stem}.weight')}{other}.weight" for other in joined]


def _stem(name: str) -> str:
    """The name of a matrix within its layer."""
    return name.removesuffix(".weight").rpartition(".")[-1]
