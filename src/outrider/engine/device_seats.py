"""Requests in the slots of captured rounds: what was read of them, and what a round brought them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.core.device_round import PIECE_LEN
from outrider.core.device_sampling import Stages
from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation, Plan
from outrider.core.reading import NO_PROMPTS, Prompts
from outrider.core.request import Origin, RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.finish import emit

NUM_PIECES = (0, 4, 16)
"""Pieces of prompts that a round may read: a round is captured for each."""


@dataclass(frozen=True, eq=False)
class Joining:
    """A request on its way to a slot."""

    number: int
    state: RequestState
    cache: Any
    """What was read of its tokens; None for nothing."""
    is_read: bool
    features: Tensor | None = None
    """[n, F] the tapped states of the tokens that were read, where the drafter wants them."""


@dataclass
class Seat:
    """A request in a slot."""

    number: int
    state: RequestState
    stages: Stages
    """Stages of the sampler that the request needs."""
    num_read: int
    """Tokens of the prompt that were read, or will have been when the rounds started so far have ended."""
    began: float
    first_round: int | None = None
    """The first of its own; None as long as it stands still because its prompt is read."""
    known: int = 0
    """Tokens the drafter has certainly read."""
    num_unread: int = 0
    """Rounds since then that drafted nothing."""
    num_paged: int = 0
    """Tokens that it has pages for."""
    asks: tuple[Stages, bool, bool] = field(init=False)
    """What it asks of a round: stages of the sampler, log-probabilities, a grammar."""

    def __post_init__(self) -> None:
        params = self.state.params
        self.asks = (self.stages, params.logprobs is not None, params.grammar is not None)

    @property
    def num_left(self) -> int:
        """Tokens of the prompt still to read."""
        return len(self.state.tokens) - 1 - self.num_read if self.first_round is None else 0

    @property
    def is_constrained(self) -> bool:
        """It runs, and has a grammar."""
        return self.first_round is not None and self.state.params.grammar is not None

    def start(self, num_rounds: int) -> None:
        """Run from the next round on."""
        self.first_round, self.known = num_rounds, len(self.state.tokens) - 1
        self.state.stats.prefill_seconds += time.perf_counter() - self.began

    def take(self, note: Sequence[int], *, drafted: bool, max_len: int) -> list[int]:
        """The tokens a round brought, up to where one of them ends the request. A request whose text fails ends alone."""
        num_emitted, _, num_agreed, rejected, *choices = note
        said, num_own = choices[:num_emitted], max(0, num_emitted - num_agreed)
        origins = [Origin.ACCEPTED] * (num_emitted - num_own) + [Origin.RECOVERED if rejected else Origin.BONUS] * num_own
        try:
            taken = emit(self.state, said, origins, max_len=max_len)
        except Exception as error:
            self.state.fail(error)
            taken = 0
        if drafted:
            self.known = len(self.state.tokens) - 2
        else:
            self.num_unread += 1
        return said[:taken]


def num_pieces_left(seats: Sequence[Seat | None]) -> int:
    """Pieces of prompts that the next round should have room for: one of ``NUM_PIECES``."""
    left = sum(-(-seat.num_left // PIECE_LEN) for seat in seats if seat is not None and seat.first_round is None)
    return next((size for size in NUM_PIECES if size >= left), NUM_PIECES[-1])


def next_pieces(seats: Sequence[Seat | None], most: int) -> list[tuple[int, int]]:
    """Slots, and tokens before the piece, of what the next round reads of prompts: ``most`` pieces, first come first served."""
    reading = [(slot, seat) for slot, seat in enumerate(seats) if seat is not None and seat.num_left]
    found: list[tuple[int, int]] = []
    for slot, seat in sorted(reading, key=lambda pair: pair[1].began):
        while seat.num_left and len(found) < most:
            found.append((slot, seat.num_read))
            seat.num_read += min(PIECE_LEN, seat.num_left)
    return found


def prompts_of(seats: Sequence[Seat | None], num_pieces: int) -> Prompts:
    """What a round with so many pieces will read of prompts."""
    left = [seat.num_left for seat in seats if seat is not None and seat.num_left]
    num_places, num_wanted = num_pieces * PIECE_LEN, sum(-(-count // PIECE_LEN) for count in left)
    return Prompts(min(sum(left), num_places), num_places, num_wanted > NUM_PIECES[-1])


def observation_of(
    notes: Sequence[Sequence[int] | None],
    depth: int,
    num_nodes: int,
    seconds: float,
    plan: Plan,
    prompts: Prompts = NO_PROMPTS,
    *,
    reading: float = 0.0,
) -> Observation:
    """What a policy and the statistics read of a round of ``num_nodes`` nodes: depths, acceptance and seconds. The guesses stay
    on the device. A seat that was empty has no note: it was asked for nothing. ``reading`` are the seconds before the round in
    which the drafter caught up."""
    drafted, accepted, asked = [0] * len(notes), [0] * len(notes), (0,) * len(notes)
    if depth:
        drafted = [0 if note is None else min(note[1], depth) for note in notes]
        accepted = [0 if note is None else min(note[2], note[0]) for note in notes]
        asked = tuple(0 if note is None else depth for note in notes)
    draft = Draft(_stand_in([note[1] if note else 0 for note in notes], drafted, depth, num_nodes), Draws.DETERMINISTIC)
    chains = [list(range(count + 1)) for count in range(depth + 2)]
    paths = [chains[count] if note else [] for note, count in zip(notes, accepted, strict=True)]
    played = Plan(asked, tuple(num_nodes - 1 if length else 0 for length in asked), reason=plan.reason)
    whole = reading + seconds
    return Observation(draft, Scores(torch.zeros(0)), paths, accepted, reading, seconds, played, whole, prompts=prompts)


def _stand_in(guesses: Sequence[int], drafted: Sequence[int], depth: int, num_nodes: int) -> TokenTree:
    """Trees of as many guesses, that reach as far as the real ones: a chain, and the others beside its first node."""
    tokens = torch.zeros(len(guesses), num_nodes, dtype=torch.int64)
    if num_nodes == depth + 1:
        return TokenTree.chain(tokens, [count + 1 for count in drafted])
    places = torch.arange(num_nodes)
    reached = torch.tensor(drafted)[:, None]
    parents = torch.where(places <= reached, places - 1, 0).masked_fill(places == 0, -1)
    return TokenTree(tokens, parents, tuple(count + 1 for count in guesses))
