"""Kinds of captured rounds, and which of them are captured in advance.

A round is captured for one number of slots, guesses and pieces of prompts, and for what the samplers of its slots ask for.
There are too many kinds to capture all of them. The usual kinds, which sample with a temperature alone, are captured for every
draft length. Of the others, a few capable kinds are captured, and each serves all requests that need less.

    kind a serves b  iff  slots, walk equal;  guesses, pieces of a <= those of b;  stages, logprobs, grammars of a >= those of b

Fewer guesses than planned, and fewer pieces, are decided before anything is drawn, so the text stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from outrider.core.device_sampling import Stages

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHRINKS = 4
"""A frame is replaced by a smaller one if it has this many times too many slots."""


def num_slots(count: int) -> int:
    """Number of slots of the frame that serves so many requests at once."""
    return next((size for size in _SIZES if size >= count), count)


def frame_sizes(count: int) -> list[int]:
    """Numbers of slots: the frame for so many requests, then the smaller ones used as requests end."""
    sizes = [num_slots(count)]
    while sizes[-1] >= SHRINKS:
        sizes.append(num_slots(sizes[-1] // SHRINKS))
    return sizes


@dataclass(frozen=True)
class RoundKind:
    """Everything that distinguishes one captured round from another."""

    num_slots: int
    num_guesses: int
    num_pieces: int = 0
    stages: Stages = Stages.TEMPERATURE
    logprobs: bool = False
    constrained: bool = False
    """Whether grammars forbid tokens."""
    told: bool = False
    """Whether a rule on the host decides what follows each node."""

    def serves(self, wanted: RoundKind) -> bool:
        """Whether a round of this kind gives the right texts where the other kind was wanted."""
        shorter = self.num_guesses <= wanted.num_guesses and self.num_pieces <= wanted.num_pieces
        richer = self.stages >= wanted.stages and self.logprobs >= wanted.logprobs and self.constrained >= wanted.constrained
        return (self.num_slots, self.told) == (wanted.num_slots, wanted.told) and shorter and richer

    @property
    def worth(self) -> tuple[int, int, bool, int, bool]:
        """Rank among kinds that serve; the largest is best. It prefers reading prompts, then long drafts, then little extra
        work."""
        return self.num_pieces, self.num_guesses, not self.constrained, -self.stages, not self.logprobs


def best_of(kinds: Iterable[RoundKind], wanted: RoundKind) -> RoundKind | None:
    """The best of the kinds that serve."""
    return max((kind for kind in kinds if kind.serves(wanted)), key=lambda kind: kind.worth, default=None)


def usual_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> list[RoundKind]:
    """Rounds of requests that sample with a temperature alone. The first of ``guesses`` is the shortest draft. A single slot
    reads its prompt before anything is drafted."""
    both = product(guesses, pieces)
    return [RoundKind(num_slots, length, count) for length, count in both if num_slots > 1 or not count or length == guesses[0]]


def other_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> Iterator[RoundKind]:
    """Rounds for all other requests. Those without which a request would wait for a capture come first."""
    least, few, lengths = guesses[0], pieces[: 2 if num_slots > 1 else 1], _thinned(guesses)
    everything = RoundKind(num_slots, least, 0, Stages.TYPICAL, logprobs=True)
    with_grammars, truncating = replace(everything, constrained=True), RoundKind(num_slots, least, 0, Stages.TOP_P)
    for kind, count in product((everything, with_grammars, truncating), few):
        yield replace(kind, num_pieces=count)
    for kind, length, count in product((truncating, everything, with_grammars), lengths[1:], few):
        yield replace(kind, num_guesses=length, num_pieces=count)


def told_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> Iterator[RoundKind]:
    """Rounds for all requests under a rule on the host. The rule takes the logits, so there is one sampler. Kinds with
    log-probabilities have the shortest draft. A single slot that reads its prompt has no logits yet."""
    for kind in usual_kinds(num_slots, guesses, pieces):
        yield replace(kind, told=num_slots > 1 or not kind.num_pieces)
    for count in pieces[: 2 if num_slots > 1 else 1]:
        yield RoundKind(num_slots, guesses[0], count, logprobs=True, told=True)


def _thinned(guesses: Sequence[int]) -> list[int]:
    """The shortest and the longest draft length, and powers of two between them."""
    return [length for length in guesses if length in (guesses[0], guesses[-1]) or length & (length - 1) == 0]
