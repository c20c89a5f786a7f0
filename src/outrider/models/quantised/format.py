"""The interface of a quantisation format: the names of a matrix's tensors, and how they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from outrider.models.quantised.matrix import Quantised

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors of one matrix by the ending of their name."""
Settings: TypeAlias = Mapping[str, Any]
"""The ``quantization_config`` of a config.json."""


@dataclass(frozen=True)
class Names:
    """Endings of the names of a quantised matrix's tensors, which share their beginning."""

    marker: str
    """The ending that only a quantised matrix has."""
    others: tuple[str, ...]
    """The other endings; a matrix need not have all of them."""
    whole: str = ".weight"
    """The ending that the matrix would have if it were not quantised."""


class Format(ABC):
    """One format with its settings: frozen, and without any weights."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The format in words, with its main settings."""

    @property
    @abstractmethod
    def names(self) -> Names: ...

    @property
    @abstractmethod
    def codes(self) -> tuple[str, int]:
        """The ending of the tensor with the codes of a matrix, and the number of codes in each of its elements."""

    @property
    def stays(self) -> bool:
        """Whether a CPU can multiply the codes as they are, because they are whole numbers (``stored.py``)."""
        return True

    @property
    def reorders(self) -> bool:
        """Whether the inputs of a group need not be neighbours (act-order)."""
        return False

    @property
    def packs(self) -> bool:
        """Whether a GPU can multiply the codes as they are (``packed_rows.py``)."""
        return self.stays

    @property
    def is_of_experts(self) -> bool:
        """Whether only the matrices of experts are quantised."""
        return False

    def matrix(self, parts: Parts) -> Quantised | None:
        """The matrix as codes and scales; None for codes that no product here takes as they are."""
        del parts
        return None

    def dequantised(self, parts: Parts) -> Tensor:
        """The matrix as float32, in the shape an unquantised checkpoint has: the reference."""
        found = self.matrix(parts)
        assert found is not None, "a format without codes for a product dequantises by itself"
        return found.dequantised()
