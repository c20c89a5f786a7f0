"""Which decoder of a model is wanted, and what is said where it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import OptionError


@dataclass(frozen=True)
class Speed:
    """Which decoder is wanted."""

    fast: bool
    numerics: str
    bits: int
    page_len: int

    @property
    def leaves_stored(self) -> bool:
        """Whether the native pass, which multiplies stored matrices, is what is wanted."""
        return self.fast and not self.page_len


def refuse(speed: Speed) -> None:
    """Weights of few bits and invariant numerics are those of the GPU's fast decoder and of the CPU's native pass. A CPU has
    8 bits without it, too."""
    wanted = f"numerics = {speed.numerics!r}" if speed.numerics == "invariant" else ""
    wanted = wanted or ("" if speed.bits == 16 else f"dtype = 'int{speed.bits}'")
    if wanted:
        on_cpu = "; on a CPU it needs the native pass, and dtype = 'int8' does not" if speed.bits == 4 else ""
        raise OptionError(
            f"{wanted} is not available for this model here; it needs fast=True, a CUDA device, a 16-bit type and a model "
            f"whose gpu path in `outrider info` is the fast decoder (few bits: with SiLU gates, without experts){on_cpu}"
        )
