"""Requests in the slots of captured rounds: how far their prompts were read, and the tokens that rounds emit for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor

from outrider.core.device_round import PIECE_LEN
from outrider.core.device_sampling import stages_for
from outrider.core.prompt_reading import Prompts
from outrider.core.request import RequestState
from outrider.engine.finish import take

NUM_PIECES = (0, 4, 16)
"""Numbers of prompt pieces that a round may read. A round is captured for each."""
_NEWEST = 1 / 16
"""Weight of the latest round in a running mean."""


@dataclass(eq=False)
class Seat:
    """A request in a slot, or on its way to one."""

    number: int
    state: RequestState
    cache: Any = None
    """Keys and values of the tokens that were read before it took the slot, which owns them from then on; None if there are
    none."""
    features: Tensor | None = None
    """[n, F] tapped states of those tokens, where the drafter needs them."""
    began: float = field(default_factory=time.perf_counter)
    first_round: int | None = None
    """Number of its first round; None while its prompt is being read."""
    known: int = 0
    """Tokens that the drafter has certainly read."""
    num_unread: int = 0
    """Tokens of rounds since then that drafted nothing."""
    num_paged: int = 0
    """Tokens that the slot has pages for."""
    rank: tuple[int, int] = (0, 0)
    """Its rank: requests with a smaller one get slots, and are read, before others."""

    def __post_init__(self) -> None:
        params, stages = self.state.params, stages_for([self.state.request])
        assert stages is not None, "the host samples for the others"
        self.asks = (stages, params.logprobs is not None, params.grammar is not None)
        """Features that its rounds must support: stages of the sampler, log-probabilities, a grammar."""
        self.num_read = 0 if self.cache is None else self.cache.lengths[0]
        """Prompt tokens that were read, or will be when all started rounds have ended."""

    @property
    def num_left(self) -> int:
        """Tokens of the prompt still to read."""
        return len(self.state.tokens) - 1 - self.num_read if self.first_round is None else 0

    @property
    def is_read_at_once(self) -> bool:
        """Whether one round has room for all that is left of the prompt."""
        return self.num_left <= NUM_PIECES[-1] * PIECE_LEN

    @property
    def draws(self) -> bool:
        """Whether its tokens are drawn at random."""
        return self.state.params.temperature > 0

    @property
    def is_constrained(self) -> bool:
        """Whether it runs, and has a grammar."""
        return self.first_round is not None and self.state.params.grammar is not None

    def runs_in(self, index: int) -> bool:
        """Whether it takes part in this round of the lane."""
        return self.first_round is not None and self.first_round <= index

    def start(self, num_rounds: int) -> None:
        """Run from the next round on."""
        self.first_round, self.known = num_rounds, len(self.state.tokens) - 1
        self.state.stats.prefill_seconds += time.perf_counter() - self.began

    def take(self, note: Sequence[int], *, drafted: bool, max_len: int) -> list[int]:
        """Take the tokens of a round, up to where one of them ends the request."""
        num_emitted, _, num_agreed, rejected, *choices = note
        taken = take(self.state, choices[:num_emitted], num_agreed, rejected=bool(rejected), max_len=max_len)
        if drafted:
            self.known = len(self.state.tokens) - 2
        else:
            self.num_unread += num_emitted
        return taken


@dataclass(eq=False)
class Arriving:
    """Running means: how often requests join a lane, and how much longer a token takes in rounds that read a few pieces."""

    num_joined: int = 0
    """Requests that joined since the last round."""
    _rate: float = 0.0
    """Requests that join per round, as a running mean."""
    _means: dict[bool, tuple[float, float]] = field(default_factory=dict)
    """Seconds and tokens of rounds, by whether they read a few pieces. Their numbers of guesses may differ."""

    def begin_round(self) -> None:
        self._rate += _NEWEST * (self.num_joined - self._rate)
        self.num_joined = 0

    def took(self, seconds: float, num_tokens: int, num_pieces: int) -> None:
        """Record the seconds of a round on the device, and the tokens it emitted."""
        if num_tokens and num_pieces <= NUM_PIECES[1]:
            old = self._means.get(num_pieces > 0, (seconds, num_tokens))
            self._means[num_pieces > 0] = old[0] + _NEWEST * (seconds - old[0]), old[1] + _NEWEST * (num_tokens - old[1])

    @property
    def _added(self) -> float:
        """Time that a few pieces add, in rounds; 0 until both kinds of rounds were seen."""
        if len(self._means) < 2:
            return 0.0
        plain, reading = (seconds / num_tokens for seconds, num_tokens in (self._means[False], self._means[True]))
        return max(0.0, reading / plain - 1)

    def num_seated(self, joining: Sequence[Seat], num_slots: int, *, is_idle: bool) -> int:
        """Number of joining requests that take slots now: as many as have pieces for one round. The first piece makes a round
        longer, further ones hardly do, so fewer requests wait for each other. Waiting one round saves the time that later
        arrivals would have added, and leaves the slots empty meanwhile."""
        pieces, enough = [-(-seat.num_left // PIECE_LEN) for seat in joining], NUM_PIECES[1]
        if is_idle or sum(pieces) > 2 * enough:
            return len(pieces)
        if sum(pieces) < enough:
            return 0 if self._rate * self._added > len(pieces) / num_slots else len(pieces)
        return next(count for count, filled in enumerate(accumulate(pieces), 1) if filled >= enough)


def num_pieces_left(seats: Iterable[Seat]) -> int:
    """Number of prompt pieces that the next round has room for, one of ``NUM_PIECES``. Sixteen pieces make a round three times
    as long whether they are filled or not, so they are taken only if more than half are filled."""
    left = sum(-(-seat.num_left // PIECE_LEN) for seat in seats)
    return max(NUM_PIECES[1], *(size for size in NUM_PIECES if size < 2 * left)) if left else 0


def next_pieces(seats: Mapping[int, Seat], most: int) -> list[tuple[int, int]]:
    """Slots, and prompt tokens before each piece, of the ``most`` pieces that the next round reads, in order of
    importance and arrival."""
    reading = [(slot, seat) for slot, seat in seats.items() if seat.num_left]
    found: list[tuple[int, int]] = []
    for slot, seat in sorted(reading, key=lambda pair: (pair[1].rank, pair[1].began)):
        while seat.num_left and len(found) < most:
            found.append((slot, seat.num_read))
            seat.num_read += min(PIECE_LEN, seat.num_left)
    return found


def prompts_of(seats: Iterable[Seat], num_pieces: int) -> Prompts:
    """The prompt tokens that a round with so many pieces will read."""
    left = [seat.num_left for seat in seats]
    num_places, num_wanted = num_pieces * PIECE_LEN, sum(-(-count // PIECE_LEN) for count in left)
    return Prompts(min(sum(left), num_places), num_places, num_wanted > NUM_PIECES[-1])
