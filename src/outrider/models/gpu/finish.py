"""The end of a product inside its kernel: bias and activation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "clamped": 4}
"""Numbers by which kernels know the activations."""


@dataclass(frozen=True, eq=False)
class Finish:
    """A bias, then an activation (of the gate, if there is one)."""

    activation: str = "silu"
    bias: Tensor | None = None


SILU = Finish()
