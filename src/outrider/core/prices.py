"""What rounds cost on this machine, measured before they are served.

A round costs by its rows and by the guesses of a row. That belongs to the machine and the models, not to a text, so it is
measured once and kept (``outrider/rehearsal``). A policy that is given a ``PriceSource`` need not try lengths on its users to
learn what they cost. Between what was measured, and beyond it, costs follow straight lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

Points = tuple[tuple[float, float], ...]
"""A curve: places and seconds, by rising place."""
Surface = tuple[tuple[int, Points], ...]
"""Curves over guesses, for each number of rows that was measured."""


@final
@dataclass(frozen=True)
class Prices:
    """Seconds of the parts of a round."""

    passes: Surface
    """All of a round but its drafter, by the guesses of a row in the pass."""
    drafts: Surface = ()
    """The drafter, by guesses along a path; empty where it was not measured. Zero where the whole round is in ``passes``."""

    def passing(self, rows: int, guesses: float) -> float:
        """Seconds of a round, its drafter left out. Where one number of rows was measured, those of a pass with as many packed
        nodes."""
        (count, points), *others = self.passes
        return _across(self.passes, rows, guesses) if others else between(points, rows * (1 + guesses) / count - 1)

    def drafting(self, rows: int, guesses: float) -> float | None:
        """Seconds of drafting so many guesses for each row; None where drafting was not measured."""
        return _across(self.drafts, rows, guesses) if self.drafts else None

    def to_json(self) -> dict[str, Any]:
        return {"passes": self.passes, "drafts": self.drafts}

    @staticmethod
    def of_json(value: Any) -> Prices:
        """The prices that ``to_json`` wrote; ``ValueError`` for anything else."""
        if not isinstance(value, Mapping):
            raise ValueError("a list of prices is an object with 'passes' and 'drafts'")
        passes, drafts = (_surface(value.get(name)) for name in ("passes", "drafts"))
        if not passes or any(seconds <= 0 for _, points in passes for _, seconds in points):
            raise ValueError("a list of prices has passes, and each takes time")
        return Prices(passes, drafts)


class PriceSource(ABC):
    """Where a policy gets prices, when it first needs them."""

    @abstractmethod
    def read(self, nodes_of: Callable[[int], int]) -> Prices | None:
        """The prices, measured now if they are not known; None if they cannot be. ``nodes_of`` says how many guesses in
        all a draft of so many along a path has, where it is a tree."""

    @abstractmethod
    def doubt(self) -> None:
        """Real rounds contradict these prices: measure them again next time."""


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """The curve at ``place``, along straight lines. Beyond its ends the nearest line goes on, but never falls."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (place,)), 1), len(points) - 1)
    (left_at, left), (right_at, value) = points[right - 1], points[right]
    slope = (value - left) / (right_at - left_at)
    if place > right_at:
        return value + max(slope, 0.0) * (place - right_at)
    return left + slope * max(place - left_at, 0.0)


def _across(surface: Surface, rows: int, guesses: float) -> float:
    return between([(count, between(points, guesses)) for count, points in surface], rows)


def _surface(value: Any) -> Surface:
    """Curves as they were read from a file, checked."""
    if not isinstance(value, list):
        raise ValueError("prices are lists of rows and curves")
    surface = tuple((int(rows), _points(points)) for rows, points in value)
    counts = [rows for rows, _ in surface]
    if any(rows < 1 for rows in counts) or sorted(set(counts)) != counts:
        raise ValueError("prices have rising numbers of rows of at least 1")
    return surface


def _points(value: Any) -> Points:
    """A curve as it was read from a file, checked."""
    if not isinstance(value, list) or not value:
        raise ValueError("a curve of prices is a list of places and seconds")
    points = tuple((float(place), float(seconds)) for place, seconds in value)
    places = [place for place, _ in points]
    if any(not 0 <= seconds < 1e6 for _, seconds in points) or sorted(set(places)) != places:
        raise ValueError("a curve of prices has rising places, and seconds that are not negative")
    return points
