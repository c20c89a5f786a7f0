"""How a cache stores the numbers of keys and values: in the model's own type, or rounded to 8 bits with a scale.

A scale belongs to one token and one key head of one layer. So a stored key depends on nothing but the key itself. No other
token, row or pass changes it. A node of a tree stores what plain decoding stores for the same token. Keys that the current
pass has made are read back from the cache like all others, so nobody ever sees them unrounded.

    scale = max |x| / largest,      code = round(x / scale),      x' = code * scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest

SMALLEST = 1e-30
"""Lower bound of a key's largest number, so that no scale is 0."""


@final
@dataclass(frozen=True)
class KeyStorage:
    """A type of the numbers of keys and values."""

    name: str
    codes: torch.dtype | None = None
    """Type of a code; None where numbers are stored in the model's own type."""
    largest: float = 1.0
    """The largest code."""

    @property
    def is_rounded(self) -> bool:
        return self.codes is not None

    def rounded(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [.., D] and float32 scales [..] of keys or values [.., D]."""
        assert self.codes is not None, "numbers of the model's own type have no codes"
        wide = numbers.float()
        scales = wide.abs().amax(-1).clamp_(min=SMALLEST) * (1.0 / self.largest)
        exact = wide / scales[..., None]
        return (exact.round() if self.codes is torch.int8 else exact).to(self.codes), scales

    def restored(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of codes [.., D] and their scales [..]."""
        return (codes.float() * scales[..., None]).to(dtype)


OWN = KeyStorage("auto")
FP8, INT8 = KeyStorage("fp8", torch.float8_e4m3fn, 448.0), KeyStorage("int8", torch.int8, 127.0)
STORAGES = {each.name: each for each in (OWN, FP8, INT8)}
"""All storages, by the names of the option ``kv_cache``."""


def storage_named(name: str) -> KeyStorage:
    """The storage that the option ``kv_cache`` asks for."""
    if name not in STORAGES:
        raise OptionError(f"kv_cache = {name!r} is not valid; {nearest(name, list(STORAGES))}")
    return STORAGES[name]


def not_available(storage: KeyStorage, reason: str) -> OptionError:
    """The error where a model or a device cannot store keys so."""
    return OptionError(f"kv_cache = {storage.name!r} is not available for this model here: {reason}; leave it out")


def check_heads(storage: KeyStorage, *, is_latent: bool) -> None:
    """Refuse latent attention, whose cache holds one vector for all heads."""
    if is_latent:
        raise not_available(storage, "a latent stands for the keys and values of all heads, and stays as it is")
