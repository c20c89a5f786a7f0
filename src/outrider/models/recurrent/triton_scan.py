"""One layer's scan on a GPU: a kernel that convolves and writes the log, and one that reads states, log and nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

from torch import Tensor

from outrider.cache.recurrent import StateColumns
from outrider.cache.replay import ScanShape
from outrider.models.recurrent.layers import LayerScan, RecurrentPass

Numbers = TypeVar("Numbers")
"""The parameters that a layer's kernels read besides the projected inputs."""


class TritonScan(LayerScan, ABC, Generic[Numbers]):
    """The common part of all GPU scans: it calls their two kernels, whose sums are in float32."""

    def __init__(self, shape: ScanShape, numbers: Numbers) -> None:
        self._shape, self._numbers = shape, numbers

    @final
    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        columns, shape, projected = step.cache.columns(layer), self._shape, projected.contiguous()
        mixed = projected.new_empty(step.batch_size, step.num_nodes, shape.conv_size)
        self._convolve(projected, mixed, columns, step)
        out = projected.new_empty(step.batch_size, step.num_nodes, shape.num_heads * shape.head_dim)
        self._read((projected, mixed), out, columns, step)
        return out

    @abstractmethod
    def _convolve(self, projected: Tensor, mixed: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
        """Mix the channels of nodes along their paths, and write the nodes after the log."""

    @abstractmethod
    def _read(self, inputs: tuple[Tensor, Tensor], out: Tensor, columns: StateColumns, step: RecurrentPass) -> None:
        """The outputs of nodes, from projected and convolved inputs."""

    @staticmethod
    def _written(columns: StateColumns, step: RecurrentPass) -> tuple[int, int, int, int]:
        """Arguments of a kernel that writes the log: the new nodes, the column of the first, and the layout of the log."""
        return step.num_nodes, columns.end + step.start, columns.log.stride(0), columns.log.stride(1)

    @staticmethod
    def _seen(columns: StateColumns, step: RecurrentPass) -> tuple[int, int, int, int, int, int]:
        """Arguments of a kernel that reads: the number of new nodes and of all nodes, and the columns of the committed ones."""
        strides = columns.log.stride(0), columns.log.stride(1)
        return step.num_nodes, step.tree.num_nodes, columns.begin, columns.end, *strides

    def _sizes(self, step: RecurrentPass) -> dict[str, int]:
        """Numbers that all kernels are compiled for."""
        shape = self._shape
        return {"HEADS": shape.num_heads, "SIZE": shape.head_dim, "IS_CHAIN": step.tree.is_chain}

    def _states(self) -> dict[str, int]:
        """Arguments of a kernel that reads states by groups of heads."""
        return {"STATE": self._shape.state_size, "GROUPS": self._shape.num_groups}
