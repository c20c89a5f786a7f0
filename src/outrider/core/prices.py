"""What rounds cost on this machine, measured before they are served.

The cost of a round depends on its rows and on the guesses per row. It belongs to the machine and the models, not to a
text, so it is measured once and kept (``outrider/rehearsal``). A policy that is given a ``PriceSource`` need not try
lengths on its users to learn what they cost. Other costs are interpolated linearly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

Points = tuple[tuple[float, float], ...]
"""A curve: (place, seconds) pairs in rising order of place."""
Surface = tuple[tuple[int, Points], ...]
"""Curves over guesses, for each number of rows that was measured."""


@final
@dataclass(frozen=True)
class Prices:
    """Seconds of the parts of a round."""

    passes: Surface
    """Everything in a round but its drafter, by the guesses of a row in the pass."""
    drafts: Surface = ()
    """The drafter, by draft length. Empty if it was not measured; zero if ``passes`` includes it."""

    def passing(self, rows: int, guesses: float) -> float:
        """Seconds of a round without its drafter. If only one number of rows was measured, the packed number of nodes
        decides."""
        (count, points), *others = self.passes
        return _across(self.passes, rows, guesses) if others else between(points, rows * (1 + guesses) / count - 1)

    def drafting(self, rows: int, guesses: float) -> float | None:
        """Seconds to draft this many guesses per row; None if drafting was not measured."""
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
    """Where a policy reads prices when it first needs them."""

    @abstractmethod
    def read(self, nodes_of: Callable[[int], int]) -> Prices | None:
        """The prices, measured now if they are unknown; None if they cannot be measured. For trees, ``nodes_of`` maps
        a draft length to the number of guesses."""

    @abstractmethod
    def doubt(self) -> None:
        """Mark these prices as contradicted by real rounds, so that they are measured again next time."""


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """The curve at ``place``, interpolated linearly. Beyond its ends it is extrapolated, but never falls."""
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
    """Curves read from a file, checked."""
    if not isinstance(value, list):
        raise ValueError("prices are lists of rows and curves")
    surface = tuple((int(rows), _points(points)) for rows, points in value)
    counts = [rows for rows, _ in surface]
    if any(rows < 1 for rows in counts) or sorted(set(counts)) != counts:
        raise ValueError("prices have rising numbers of rows of at least 1")
    return surface


def _points(value: Any) -> Points:
    """A curve read from a file, checked."""
    if not isinstance(value, list) or not value:
        raise ValueError("a curve of prices is a list of places and seconds")
    points = tuple((float(place), float(seconds)) for place, seconds in value)
    places = [place for place, _ in points]
    if any(not 0 <= seconds < 1e6 for _, seconds in points) or sorted(set(places)) != places:
        raise ValueError("a curve of prices has rising places, and seconds that are not negative")
    return points
