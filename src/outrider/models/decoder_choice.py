"""Options for the decoder of a model, and the errors for decoders that are not available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from outrider.core.errors import OptionError


class Running(TypedDict, total=False):
    """Options of ``load_model`` for running passes. Defaults: the fast decoder, with the usual numerics and pages."""

    fast: bool
    numerics: str
    page_len: int


@dataclass(frozen=True)
class Speed:
    """The wanted decoder."""

    fast: bool
    numerics: str
    bits: int
    page_len: int
    rounds_inputs: bool = False
    """Whether inputs are rounded to 8 bits too (``dtype="w8a8"``)."""
    float_inputs: bool = False
    """Whether inputs stay floats in products with stored matrices (``dtype="stored-exact"``)."""


def refuse(speed: Speed) -> None:
    """Refuse what the plain decoder lacks: few-bit weights and invariant numerics belong to the GPU's fast decoder and
    the CPU's native pass. A CPU has 8 bits without it, too."""
    if speed.numerics == "invariant":
        raise OptionError(
            "numerics = 'invariant' is not available for this model here; see \"same bits\" in `outrider info MODEL`, or use "
            "method='plain' with max_batch_size=1, which scores every text alone"
        )
    if speed.rounds_inputs:
        raise OptionError(
            "dtype = 'w8a8' is not available for this model here; use the native pass of a CPU (fast=True) and inputs in "
            "groups of 32. On a GPU use one with compute capability 8.9 or later, and a model whose gpu path in "
            "`outrider info` is the fast decoder. Elsewhere use dtype = 'int8', which rounds the weights alone"
        )
    if speed.bits != 16:
        on_cpu = "; on a CPU it needs the native pass, and dtype = 'int8' does not" if speed.bits == 4 else ""
        raise OptionError(
            f"dtype = 'int{speed.bits}' is not available for this model here; use fast=True, a CUDA device and a model "
            f"whose gpu path in `outrider info` is the fast decoder{on_cpu}"
        )
