"""The halves of lanes that run as captured rounds on a GPU, by the lane's name; none on other machines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from outrider.core.method import Method
from outrider.core.report import RoundReport
from outrider.engine.job import Job
from outrider.engine.memory import BatchSize

if TYPE_CHECKING:
    from outrider.engine.device_lane import DeviceLane

NewLane = Callable[[Method], "DeviceLane | None"]
"""Makes the lane of a method; None where its rounds cannot be captured."""


@dataclass(frozen=True)
class OnDevice:
    """The name of a lane's captured half."""

    lane: Hashable


@final
class DeviceLanes:
    """The device lanes, each made when the first request of its lane asks."""

    def __init__(
        self,
        new_lane: NewLane | None,
        find_method: Callable[[Hashable], Method],
        on_read: Callable[[int, Any], object],
    ) -> None:
        """Without ``new_lane`` there are none. ``on_read`` is told of every request that was read inside rounds."""
        self._new_lane, self._find_method, self._on_read = new_lane, find_method, on_read
        self._lanes: dict[Hashable, DeviceLane | None] = {}

    def home(self, job: Job) -> DeviceLane | None:
        """The lane that takes a request, if its rounds can be captured with all that it asks for."""
        if self._new_lane is None or job.traced or job.max_draft is not None:
            return None
        if job.lane not in self._lanes:
            made = self._lanes[job.lane] = self._new_lane(self._find_method(job.lane))
            if made is not None:
                made.on_read = self._on_read
        lane = self._lanes[job.lane]
        return lane if lane is not None and lane.accepts(job.state.request) else None

    def __getitem__(self, name: OnDevice) -> DeviceLane:
        lane = self._lanes[name.lane]
        assert lane is not None, "somebody was sent there"
        return lane

    @property
    def ids(self) -> list[int]:
        return [number for lane in self._made.values() for number in lane.order]

    @property
    def sizes(self) -> dict[Hashable, BatchSize]:
        return {OnDevice(name): lane.size for name, lane in self._made.items()}

    def leave(self, number: int) -> None:
        """Drop a cancelled request."""
        for lane in self._made.values():
            lane.leave(number)

    @property
    def one_too_many(self) -> int | None:
        """A request that must wait again, for the pages that others need."""
        return next((number for lane in self._made.values() if (number := lane.one_too_many) is not None), None)

    def numbers(self, name: Hashable) -> list[int]:
        """Requests of one lane."""
        return self._made[name].order if name in self._made else []

    def forget(self, name: Hashable) -> None:
        """The lane is made anew when somebody asks for it again; nobody is in it."""
        self._lanes.pop(name, None)

    def step(self) -> Iterator[RoundReport]:
        """A round of every lane. It is reported when the next one has begun."""
        for name, lane in self._made.items():
            report = lane.step()
            if report is not None:
                yield replace(report, lane=name)

    @property
    def _made(self) -> dict[Hashable, DeviceLane]:
        return {name: lane for name, lane in self._lanes.items() if lane is not None}
