"""A captured round on its way: what was planned, when it began and ended on the device, and what it noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.core.interfaces import Plan
from outrider.engine.device_seats import Seat

if TYPE_CHECKING:
    from outrider.engine.round_graph import RoundGraph


@dataclass(frozen=True, eq=False)
class Launched:
    """A round on its way."""

    graph: RoundGraph
    plan: Plan
    number: int
    """Of the graph's rounds."""
    index: int
    """Of the lane's rounds."""
    began: torch.cuda.Event
    ended: torch.cuda.Event
    is_constrained: bool
    """Grammars forbid tokens in it, and the host has yet to say which (``engine/constrained.py``)."""

    @property
    def seconds(self) -> float:
        """What the round took on the device, whatever was queued before and after it."""
        return self.began.elapsed_time(self.ended) / 1e3

    def add_logprobs(self, taking: Mapping[int, Seat], emitted: Sequence[list[int]]) -> None:
        """Give the requests that asked for them the log-probabilities of what the round brought."""
        noted = self.graph.logprobs
        for (slot, seat), tokens in zip(taking.items(), emitted, strict=True):
            count = seat.state.params.logprobs
            if count is not None and noted is not None:
                seat.state.logprobs += [
                    noted.of(self.number, slot, place, count=count, token=token) for place, token in enumerate(tokens)
                ]
