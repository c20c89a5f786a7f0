"""Kinds of captured rounds, and which of them are captured before anybody waits for one.

A round is captured for one number of slots, guesses and pieces of prompts, and for what the samplers of its slots ask for.
There are too many kinds to capture all of them. The usual ones, which sample with a temperature alone, are captured for every
length of a draft. Of the others there are a few that do more than most requests ask for: such a round serves all who ask for
less.

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
"""A frame this many times too large is given up for a smaller one."""


def num_slots(count: int) -> int:
    """Slots of the frame that serves so many requests at once."""
    return next((size for size in _SIZES if size >= count), count)


def frame_sizes(count: int) -> list[int]:
    """Slots of the frame that takes so many requests at once, and of those it is given up for as they end."""
    sizes = [num_slots(count)]
    while sizes[-1] >= SHRINKS:
        sizes.append(num_slots(sizes[-1] // SHRINKS))
    return sizes


@dataclass(frozen=True)
class RoundKind:
    """What a captured round does."""

    num_slots: int
    num_guesses: int
    num_pieces: int = 0
    stages: Stages = Stages.TEMPERATURE
    logprobs: bool = False
    constrained: bool = False
    """Grammars forbid tokens."""
    told: bool = False
    """A rule on the host says what follows each node, whatever the sampler."""

    def serves(self, wanted: RoundKind) -> bool:
        """Whether the texts are right in a round of this kind where another was wanted."""
        shorter = self.num_guesses <= wanted.num_guesses and self.num_pieces <= wanted.num_pieces
        richer = self.stages >= wanted.stages and self.logprobs >= wanted.logprobs and self.constrained >= wanted.constrained
        return (self.num_slots, self.told) == (wanted.num_slots, wanted.told) and shorter and richer

    @property
    def worth(self) -> tuple[int, int, bool, int, bool]:
        """Of two kinds that serve, the one with the larger worth is better: prompts are read, drafts are long, little
        else is computed."""
        return self.num_pieces, self.num_guesses, not self.constrained, -self.stages, not self.logprobs


def best_of(kinds: Iterable[RoundKind], wanted: RoundKind) -> RoundKind | None:
    """The best of those that serve."""
    return max((kind for kind in kinds if kind.serves(wanted)), key=lambda kind: kind.worth, default=None)


def usual_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> list[RoundKind]:
    """Rounds of requests that sample with a temperature alone."""
    return [RoundKind(num_slots, length, count) for length, count in product(guesses, pieces)]


def other_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> Iterator[RoundKind]:
    """Rounds for all other requests, those first without which some would wait for a capture; the first of ``guesses`` is the
    shortest draft."""
    least, few, lengths = guesses[0], pieces[:2], _thinned(guesses)
    everything = RoundKind(num_slots, least, 0, Stages.TYPICAL, logprobs=True)
    with_grammars, truncating = replace(everything, constrained=True), RoundKind(num_slots, least, 0, Stages.TOP_P)
    for kind, count in product((everything, with_grammars, truncating), few):
        yield replace(kind, num_pieces=count)
    for kind, length, count in product((truncating, everything, with_grammars), lengths[1:], few):
        yield replace(kind, num_guesses=length, num_pieces=count)


def told_kinds(num_slots: int, guesses: Sequence[int], pieces: Sequence[int]) -> Iterator[RoundKind]:
    """Rounds for all requests under a rule on the host: it takes the logits, so there is one sampler. Those with
    log-probabilities have the shortest draft."""
    yield from (replace(kind, told=True) for kind in usual_kinds(num_slots, guesses, pieces))
    for count in pieces[:2]:
        yield RoundKind(num_slots, guesses[0], count, logprobs=True, told=True)


def _thinned(guesses: Sequence[int]) -> list[int]:
    """The shortest and the longest draft, and powers of two between them."""
    return [length for length in guesses if length in (guesses[0], guesses[-1]) or length & (length - 1) == 0]
