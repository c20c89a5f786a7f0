"""Rotary positions: the frequency of each pair of dimensions, and the cosines and sines of every position.

Pair i of a query or key at position p is turned by the angle p * f_i. So a product of a query and a key depends on their
distance alone (Su et al. 2021). With base t and d rotated dimensions f_i = t^(-2i/d); the scalings change f so that a model
reads more than it was trained on. Angles are computed in float32, position by position, as transformers does.

    linear     f / s                                                                    (Chen et al. 2023)
    dynamic    base t * (s * n / n0 - (s - 1))^(d / (d - 2)) for contexts n > n0        (NTK-aware, 2023)
    yarn       a ramp between f and f / s by wavelength; cos, sin times 0.1 ln s + 1    (Peng et al. 2023)
    llama3     f, f / s, or between, by wavelength                                      (Llama 3.1)
    longrope   f / factor_i, one list of factors for short and one for long contexts    (Ding et al. 2024)

dynamic and longrope depend on the context. Ours is the length the model was *opened* for, never the length of the texts in the
pass. Otherwise a text would depend on its neighbours, and cached keys on the time when they were written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Parameters of one rotary embedding; those a kind does not use keep their defaults."""

    kind: str
    theta: float
    dim: int
    """Number of rotated dimensions of a head; the rest is unchanged."""
    trained_len: int
    """The context the checkpoint declares."""
    original_len: int
    """The context before it was scaled."""
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def natural_len(self) -> int:
        """The default context of the model."""
        if self.kind == "longrope":
            return min(self.trained_len, self.original_len)  # the regime of the short factors, as in transformers
        if self.kind == "yarn":
            return max(self.trained_len, int(self.original_len * self.scale))
        return self.trained_len

    @property
    def scale(self) -> float:
        return self.factor if self.factor is not None else self.trained_len / self.original_len


def inverse_frequencies(rope: Rope, context_len: int) -> tuple[Tensor, float]:
    """[dim / 2] float32 frequencies of a model opened for ``context_len`` tokens, and the factor of its cosines and sines."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.scale, 1.0
    if rope.kind == "dynamic":
        stretch = rope.scale * max(context_len, rope.trained_len) / rope.trained_len - (rope.scale - 1)
        return 1.0 / ((rope.theta * stretch ** (rope.dim / (rope.dim - 2))) ** exponents), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain), _yarn_attention(rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if context_len > rope.original_len else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents), _longrope_attention(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / plain
    turns = rope.original_len / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.scale + smooth * plain
    slow, fast = turns < rope.low_freq_factor, turns > rope.high_freq_factor
    return torch.where(slow, plain / rope.scale, torch.where(fast, plain, between))


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    def dimension_of(turns: float) -> float:
        """The dimension whose pair makes this many rotations in the original context."""
        return rope.dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.scale * ramp + plain * (1 - ramp)


def _yarn_size(rope: Rope, mscale: float) -> float:
    return 1.0 if rope.scale <= 1 else 0.1 * mscale * math.log(rope.scale) + 1.0


def _yarn_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_size(rope, rope.mscale) / _yarn_size(rope, rope.mscale_all_dim)
    return _yarn_size(rope, 1.0)


def score_factor(rope: Rope) -> float:
    """Factor of latent attention's scores: yarn scales all dimensions, not only the rotated ones."""
    return _yarn_size(rope, rope.mscale_all_dim) ** 2 if rope.kind != "default" and rope.mscale_all_dim else 1.0


def _longrope_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.scale <= 1 else math.sqrt(1 + math.log(rope.scale) / math.log(rope.original_len))


def head_order(dim: int, head_dim: int, *, interleaved: bool = False) -> Tensor | None:
    """The source of each dimension of a rotated head, so that partners are half a head apart; None if they already are.

    A file rotates the first ``dim`` dimensions with partners ``dim / 2`` apart, or neighbours (``interleaved``). Queries
    and keys that are reordered alike keep their products. Partial rotation then needs no slicing: other dimensions get
    the angle 0.
    """
    if dim == head_dim and not interleaved:
        return None
    half, free = dim // 2, (head_dim - dim) // 2
    first, second, rest = torch.arange(half), torch.arange(half, dim), torch.arange(dim, head_dim)
    if interleaved:
        first, second = torch.arange(0, dim, 2), torch.arange(1, dim, 2)
    return torch.cat((first, rest[:free], second, rest[free:]))


class RotaryTable:
    """Cosines and signed sines of every position, [S, D]. It grows with the context.

    ``x * cos + roll(x, D / 2) * sin`` is the rotation: the sines of the first half carry the minus sign.
    """

    def __init__(
        self,
        rope: Rope,
        head_dim: int,
        *,
        context_len: int,
        dtype: torch.dtype,
        device: torch.device,
        first_len: int = 4096,
    ) -> None:
        """``first_len``: initial number of positions, if the context has so many."""
        frequencies, self._attention = inverse_frequencies(rope, context_len)
        free = torch.zeros((head_dim - rope.dim) // 2)
        self._frequencies = torch.cat((frequencies, free))
        self._is_free = torch.cat((torch.zeros(rope.dim // 2), torch.ones(len(free)))).bool()
        self._dtype, self._device = dtype, device
        self._first = torch.zeros(0, 1)
        self.cos, self.sin = self._rows(min(context_len, first_len))

    def reach(self, length: int) -> None:
        """Make positions below ``length`` available."""
        if length > self.cos.shape[0]:
            self.cos, self.sin = self._rows(max(length, 2 * self.cos.shape[0]))

    def placed(self, positions: Sequence[int] | Tensor) -> RotaryTable:
        """The table for rows whose first tokens have these positions, which may have gaps and be negative. A tensor [S, D
        / 2] gives every pair of dimensions its own position."""
        table = copy(self)
        first = torch.as_tensor(positions, dtype=torch.float32, device="cpu")
        first = first[:, None] if first.dim() == 1 else first
        wider = len(self._frequencies) - first.shape[1]  # heads that were widened: what was added does not turn
        table._first = first if first.shape[1] == 1 else torch.nn.functional.pad(first, (0, wider))
        table.cos, table.sin = table._rows(len(positions))
        return table

    def _rows(self, num_positions: int) -> tuple[Tensor, Tensor]:
        later = torch.arange(len(self._first), num_positions).float()[:, None]
        angles = torch.cat((self._first * self._frequencies, later * self._frequencies))
        scale = torch.where(self._is_free, 1.0, self._attention)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return pair[0].to(self._device, self._dtype), pair[1].to(self._device, self._dtype)
