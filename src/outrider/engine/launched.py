"""A captured round on its way: what was planned, when it began and ended on the device, and what it noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outrider.core.interfaces import Plan
from outrider.core.reading import Prompts
from outrider.core.report import RoundReport
from outrider.engine.device_seats import Seat, observation_of

if TYPE_CHECKING:
    from outrider.engine.round_graph import RoundGraph


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

    @property
    def reading(self) -> float:
        """Seconds in which the device waited for the drafter to catch up, and then caught up."""
        return 0.0 if self.after is None else self.after.elapsed_time(self.began) / 1e3

    @property
    def seconds(self) -> float:
        """What the round took on the device, whatever was queued before and after it."""
        return self.began.elapsed_time(self.ended) / 1e3

    def add_logprobs(self, taking: Mapping[int, Seat], emitted: Sequence[list[int]]) -> None:
        """Give the requests that asked for them the log-probabilities of what the round brought."""
        noted = self.graph.logprobs
        if noted is None:
            return
        for (slot, seat), tokens in zip(taking.items(), emitted, strict=True):
            count = seat.state.params.logprobs
            if count is not None:
                seat.state.logprobs += [
                    noted.of(self.number, slot, place, count=count, token=token) for place, token in enumerate(tokens)
                ]

    def report(
        self,
        taking: Mapping[int, Seat],
        notes: Sequence[Sequence[int]],
        positions: Sequence[int],
        emitted: Sequence[list[int]],
        *,
        seconds: float,
    ) -> RoundReport:
        """The round of the seats that took part, counted. How its time splits between draft and score is not known."""
        graph, taken = self.graph, [notes[slot] for slot in taking]
        seen = observation_of(taken, graph.num_guesses, graph.num_nodes, seconds, self.plan)
        report = RoundReport(
            ids=[seat.number for seat in taking.values()],
            states=[seat.state for seat in taking.values()],
            positions=positions,
            seen=replace(seen, score_seconds=0.0),
            drafted=[notes[slot][1] for slot in taking],
            rejected=[bool(notes[slot][3]) for slot in taking],
            emitted=emitted,
            seconds=seconds,
        )
        report.count()
        return report
