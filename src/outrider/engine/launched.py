"""A captured round on its way: what was planned, when it began and ended on the device, and what it brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation, Plan
from outrider.core.reading import NO_PROMPTS, Prompts
from outrider.core.report import RoundReport
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.device_seats import Seat

if TYPE_CHECKING:
    from outrider.engine.round_graph import RoundGraph


@final
@dataclass(frozen=True, eq=False)
class Launched:
    """A round on its way."""

    graph: RoundGraph
    plan: Plan
    number: int
    """Number of this round among the graph's rounds."""
    index: int
    """Number of this round among the lane's rounds."""
    began: torch.cuda.Event
    ended: torch.cuda.Event
    prompts: Prompts
    after: torch.cuda.Event | None = None
    """The end of the round before it, where the device stood still until the drafter had caught up."""

    def seen(self, notes: Sequence[Sequence[int] | None]) -> Observation:
        """What the policy learns from the notes of all slots: its time is the device's, whatever was queued around it."""
        graph = self.graph
        reading = 0.0 if self.after is None else self.after.elapsed_time(self.began) / 1e3
        seconds = self.began.elapsed_time(self.ended) / 1e3
        return observation_of(notes, graph.num_guesses, graph.num_nodes, seconds, self.plan, self.prompts, reading=reading)

    def hand_out(self, taking: Mapping[int, Seat], found: Sequence[Sequence[int]], max_len: int, seconds: float) -> RoundReport:
        """Give the seats that took part what the round brought them, ``found`` by slot, and count it. How its ``seconds`` split
        between draft and score is not known."""
        graph, notes = self.graph, [found[slot] for slot in taking]
        positions = [seat.state.num_output for seat in taking.values()]
        emitted: list[list[int]] = []
        for slot, seat in taking.items():
            emitted.append(seat.take(found[slot], drafted=graph.num_guesses > 0, max_len=max_len))
            self._add_logprobs(slot, seat, emitted[-1])
        seen = observation_of(notes, graph.num_guesses, graph.num_nodes, seconds, self.plan, self.prompts)
        report = RoundReport(
            ids=[seat.number for seat in taking.values()],
            states=[seat.state for seat in taking.values()],
            positions=positions,
            seen=replace(seen, score_seconds=0.0),
            drafted=[note[1] for note in notes],
            rejected=[bool(note[3]) for note in notes],
            emitted=emitted,
            seconds=seconds,
        )
        report.count()
        return report

    def _add_logprobs(self, slot: int, seat: Seat, tokens: Sequence[int]) -> None:
        noted, count = self.graph.logprobs, seat.state.params.logprobs
        if noted is not None and count is not None:
            found = [noted.of(self.number, slot, place, count=count, token=token) for place, token in enumerate(tokens)]
            seat.state.logprobs += found


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
