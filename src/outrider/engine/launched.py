"""A captured round in flight: its plan, when it began and ended on the device, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Observation, Plan
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.core.report import RoundReport
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.device_seats import Seat

if TYPE_CHECKING:
    from outrider.engine.round_graph import RoundGraph


@final
@dataclass(frozen=True, eq=False)
class Launched:
    """A round in flight."""

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
    """End of the previous round, if the device waited until the drafter had caught up."""

    def seen(self, notes: Sequence[Sequence[int] | None]) -> Observation:
        """The observation that the policy learns from, made from the notes of all slots. Its time is the device's own, without
        queued work."""
        graph = self.graph
        reading = 0.0 if self.after is None else self.after.elapsed_time(self.began) / 1e3
        seconds = self.began.elapsed_time(self.ended) / 1e3
        return observation_of(notes, graph.num_guesses, graph.num_nodes, seconds, self.plan, self.prompts, reading=reading)

    def hand_out(self, taking: Mapping[int, Seat], found: Sequence[Sequence[int]], max_len: int, seconds: float) -> RoundReport:
        """Give the requests that took part their tokens (``found``, by slot), and count the round. How its ``seconds`` divide
        into draft and score is unknown."""
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
    """The observation of a round of ``num_nodes`` nodes for policy and statistics: depths, acceptance and seconds. The guesses
    themselves stay on the device. An empty slot has no note and counts as asked for nothing. ``reading`` are the seconds before
    the round in which the drafter caught up."""
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
    """Placeholder trees with as many guesses and the same depth as the real ones: a chain, and the other guesses beside its
    first node."""
    tokens = torch.zeros(len(guesses), num_nodes, dtype=torch.int64)
    if num_nodes == depth + 1:
        return TokenTree.chain(tokens, [count + 1 for count in drafted])
    places = torch.arange(num_nodes)
    reached = torch.tensor(drafted)[:, None]
    parents = torch.where(places <= reached, places - 1, 0).masked_fill(places == 0, -1)
    return TokenTree(tokens, parents, tuple(count + 1 for count in guesses))
