"""Random numbers as a pure function of (seed, output position, purpose, lane): the same on every device and in every batch.

A counter-based generator has no state to advance. So a number cannot depend on the numbers drawn before it, on the batch slot,
on the step or on the tree. The generator is SplitMix64 (Steele, Lea & Flood 2014): the words of the key are absorbed one by one
through its finaliser, and stream element i is ``mix(key + i * GOLDEN)``. Integer arithmetic wraps identically on CPU and GPU;
logarithms are taken in float64 and rounded once.

    uniform u in (0, 1);   exponential -log u;   Gumbel -log(-log u);   argmax(log w + Gumbel) ~ w / sum(w)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""Adding k times this to a key shifts its stream by k elements."""
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


class Purpose(IntEnum):
    """The use of a random number. Numbers for different purposes are independent."""

    TARGET = 1
    """The target's own choice at an output position (Gumbel noise over the vocabulary)."""
    DRAFT = 2
    """A drafter's sampled guess."""
    ACCEPT = 3
    """An acceptance test."""
    RESIDUAL = 4
    """The token that follows a rejection, or the bonus token of a rule that does not use TARGET noise."""


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift of int64 words (torch shifts arithmetically, so the copied sign bits are masked off)."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit flips half of the output bits."""
    words = (words ^ _shift_right(words, 30)) * _MULTIPLIER_1
    words = (words ^ _shift_right(words, 27)) * _MULTIPLIER_2
    return words ^ _shift_right(words, 31)


def make_key(seeds: Tensor, positions: Tensor, purpose: Purpose, lanes: Tensor | int = 0) -> Tensor:
    """Keys of independent streams; arguments broadcast."""
    key = mix(seeds + GOLDEN)
    key = mix(key + positions * GOLDEN + int(purpose))
    return mix(key + (torch.as_tensor(lanes, device=key.device) + 1) * GOLDEN)


def uniform(words: Tensor) -> Tensor:
    """float64 in the open interval (0, 1) from the top 52 bits of each word."""
    return (_shift_right(words, 12).double() + 0.5) * 2.0**-52


def exponential_stream(keys: Tensor, length: int) -> Tensor:
    """[..., length] unit exponential numbers, float64."""
    counter = torch.arange(1, length + 1, device=keys.device, dtype=torch.int64) * GOLDEN
    return -torch.log(uniform(mix(keys.unsqueeze(-1) + counter)))


def gumbel_stream(keys: Tensor, length: int) -> Tensor:
    """[..., length] standard Gumbel numbers, float32."""
    return -torch.log(exponential_stream(keys, length)).float()


OWED_LANE = 0
"""The lane of the race that draws the token after an accepted path (``Purpose.RESIDUAL``)."""

GumbelStream = Callable[[Tensor, int], Tensor]
"""``gumbel_stream``, or a device's faster implementation with the same numbers."""


Masks = Mapping[tuple[int, int], Tensor]
"""[V] boolean masks of the tokens that a grammar allows, by row and node."""


class Chosen(NamedTuple):
    """A target's choices after the nodes of trees."""

    tokens: Tensor
    """[B, M]; -1 where rounding decides."""
    num_open: int = 0
    """Number of choices that are -1."""
    walks: Sequence[RowVerdict] | None = None
    """The walk of each row along its choices, where the target's own code makes it and all choices are known. It equals that of
    ``acceptance/coupled.py``."""


class Choose(Protocol):
    """The target's choices after nodes ``start``.. of ``tree``, from their raw logits [B, M, V]. ``tempering`` and ``masks``
    shape the laws."""

    def __call__(
        self,
        logits: Tensor,
        tempering: Tempering,
        *,
        noise: Noise,
        tree: TokenTree,
        start: int,
        masks: Masks,
    ) -> Chosen: ...


@dataclass(frozen=True, eq=False)
class Noise:
    """The random numbers of one round of B requests.

    The target's noise belongs to the absolute output position, so the text is a function of the seed, whatever was drafted. All
    other noise belongs to the *round*, named by the output position it starts from. It must not be reused. A rule that looks
    ahead (block, traversal) stops because of guesses it then discards. Drawing those positions again with the same numbers
    would bias the next round."""

    seeds: Tensor
    """[B] int64."""
    positions: Tensor
    """[B] int64 output position of the next token: the number of tokens the request has emitted."""

    stream: GumbelStream = gumbel_stream
    choose: Choose | None = None
    """A device's own implementation of the target's choices, with the same numbers."""
    of_the_end: bool = False
    """Guesses are made with the numbers that draw the token after an accepted path. Such a guess foresees that token as often
    as the drafter's law is like the target's."""
    _known: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """On a CPU: cached [B, D, V] target noise of the first D depths, by vocabulary size. Drafter and target share it.
    """

    def target_gumbel(self, depths: Tensor, vocab_size: int) -> Tensor:
        """[B, M, V] Gumbel noise of the output positions that follow nodes at ``depths`` [B, M]."""
        if depths.device.type != "cpu":
            return self._target_gumbel(depths, vocab_size)
        known, needed = self._known.get(vocab_size), int(depths.max()) + 1
        num_known = 0 if known is None else known.shape[1]
        if needed > num_known:
            more = self._target_gumbel(torch.arange(num_known, needed).expand(len(self.seeds), -1), vocab_size)
            known = self._known[vocab_size] = more if known is None else torch.cat((known, more), 1)
        assert known is not None
        return known[torch.arange(len(known))[:, None], depths]

    def _target_gumbel(self, depths: Tensor, vocab_size: int) -> Tensor:
        keys = make_key(self.seeds[:, None], self.positions[:, None] + depths, Purpose.TARGET)
        return self.stream(keys, vocab_size)

    def gumbel(self, purpose: Purpose, lanes: Tensor, vocab_size: int) -> Tensor:
        """[B, M, V] Gumbel noise of this round, one stream per lane of ``lanes`` [B, M]."""
        if self.of_the_end:
            purpose, lanes = Purpose.RESIDUAL, torch.full_like(lanes, OWED_LANE)
        return self.stream(self._round_keys(purpose, lanes), vocab_size)

    def exponential(self, purpose: Purpose, lanes: Tensor, vocab_size: int) -> Tensor:
        """[B, M, V] exponential noise of this round: argmin(noise / w) is a draw from w, and no weight needs a logarithm."""
        return exponential_stream(self._round_keys(purpose, lanes), vocab_size)

    def uniform(self, purpose: Purpose, lanes: Tensor) -> Tensor:
        """[B, M] uniform numbers of this round, one per lane."""
        return uniform(mix(self._round_keys(purpose, lanes) + GOLDEN))

    def _round_keys(self, purpose: Purpose, lanes: Tensor) -> Tensor:
        return make_key(self.seeds[:, None], self.positions[:, None], purpose, lanes)
