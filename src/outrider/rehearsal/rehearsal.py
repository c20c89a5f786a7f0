"""A rehearsal: rounds of made-up requests are timed before real ones are served, so that a policy knows the costs of rounds.

Where the host drives rounds, passes are timed with made-up chains of 1 to 256 nodes, and with 8 and 32 rows, since a row costs
more than its nodes. Drafting is timed with the method's own drafter, for 1, 8 and 32 rows. Where rounds are captured graphs,
whole rounds of 1, 8 and 64 slots are timed (``trial.py``). The result is kept in the cache folder, beside the native build,
under a name made of the machine, the models, the method and the version. A file that cannot be read is ignored and written
anew. Stored prices are checked: if a round takes much less time than they say, they were measured on a busy machine, and are
measured again. A drafter that learns across requests is left out, so a rehearsal changes no text and no guess.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch

from outrider.core.errors import OutriderError
from outrider.core.interfaces import Drafter, Target
from outrider.core.kept_json import keep_json, read_json
from outrider.core.method import Method
from outrider.core.own_time import own_seconds
from outrider.core.prices import Prices, PriceSource, Surface
from outrider.core.version import VERSION
from outrider.models.native import cache_folder, isa_here, processor
from outrider.rehearsal.trial import Chains, Cost, DeviceTrial, HostTrial, Trial

if TYPE_CHECKING:
    from outrider.engine.captured_rounds import RoundGraphs

Wanted = Sequence[tuple[int, Sequence[int]]]
"""Numbers of rows, and the draft lengths to time for each. The most informative ones come first, because a slow model may not
get through all of them."""
Table = Mapping[int, Mapping[int, Cost]]
"""Measured costs by number of rows and guesses."""

_PASSES: Wanted = [(1, (0, 7, 63)), (32, (0, 2)), (8, (0, 4)), (1, (3, 15, 31, 1)), (8, (1, 8)), (1, (255,))]
_DRAFTS: Wanted = [(1, (1, 2, 4, 8)), (8, (1, 4)), (32, (1, 4))]
_CAPTURED: Wanted = [(1, (0, 4)), (8, (0, 4)), (64, (0, 4)), (1, (1, 8, 2)), (8, (1, 8, 2)), (64, (1, 8, 2))]
_TRIED, _TOO_DEAR = (0, 4), 1.25
"""Draft lengths of one row with which stored prices are checked, and by what factor they may exceed the measured time."""
_BUDGET = {"cpu": 0.3, "cuda": 8.0}
"""Seconds after which no further price is measured. On a GPU most of this time goes into compiling kernels and capturing
graphs, for which the first requests would have waited."""
_SHORTEST_CONTEXT = 256
_KIND = "passes of one row and of several"
"""Version of the meaning of prices. Stored prices with another version are ignored."""


def expect_prices(
    method: Method,
    target: Target,
    label: Mapping[str, Any],
    graphs_of: Callable[[Method], RoundGraphs | None],
    prices: KnownPrices,
) -> None:
    """Give the method's policy its prices. ``graphs_of`` captures a method; it returns None where the host drives rounds.
    ``prices`` holds what was read for other methods on these models."""
    known = ref(method)  # captured rounds hold the policy, and live as long as their method

    def graphs() -> RoundGraphs | None:
        method = known()
        return None if method is None else graphs_of(method)

    method.policy.expect(Rehearsal(target, method.drafter, label, graphs, known=prices))


@final
@dataclass(eq=False)
class KnownPrices:
    """Prices that this process has read, for all methods on the same models."""

    by_path: dict[Path, Prices] = field(default_factory=dict[Path, Prices])
    is_serving: bool = False
    """Whether requests are being served and would wait for timed rounds. If so, drafts without stored prices are measured by
    the rounds themselves."""

    def of_passes(self) -> Prices | None:
        """Prices of passes alone, which all host-driven methods share."""
        return next((Prices(known.passes) for known in self.by_path.values()), None)


@final
@dataclass(frozen=True, eq=False)
class Rehearsal(PriceSource):
    """The prices of a method on a target, from the cache folder or from timed rounds."""

    target: Target
    drafter: Drafter
    label: Mapping[str, Any]
    """Text that identifies the models and the method."""
    graphs: Callable[[], RoundGraphs | None] = lambda: None
    """The captured rounds; None where the host drives rounds."""
    folder: Path = field(default_factory=cache_folder)
    clock: Callable[[], float] = own_seconds
    known: KnownPrices = field(default_factory=KnownPrices)
    """Prices that were read and checked in this process. They are not checked again, because requests would wait for it."""

    @property
    def path(self) -> Path:
        """File of these prices."""
        target, device = self.target, self.target.device
        shape = [type(target).__name__, target.num_layers, target.vocab_size, target.max_len, str(target.dtype)]
        machine = [processor(), isa_here().flags, torch.get_num_threads(), os.environ.get("OUTRIDER_NATIVE", "")]
        machine += [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
        label = {name: value for name, value in self.label.items() if isinstance(value, str | int | float | list)}
        key = json.dumps([VERSION, _KIND, torch.__version__, machine, shape, type(self.drafter).__name__, label], default=str)
        return self.folder / f"prices-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"

    def read(self, nodes_of: Callable[[int], int]) -> Prices | None:
        if self.target.traits.reads_whole or self.target.max_len < _SHORTEST_CONTEXT:
            return None
        prices = self.known.by_path.get(self.path) or self._timed_now(nodes_of)
        if prices is not None:
            self.known.by_path[self.path] = prices
        return prices

    def _timed_now(self, nodes_of: Callable[[int], int]) -> Prices | None:
        """The stored prices if they hold, or new ones. Nothing is timed while requests are served."""
        graphs, known = self.graphs(), _stored(self.path)
        if self.known.is_serving:
            return known or (self.known.of_passes() if graphs is None else None)
        passes = HostTrial(self.target, Chains(self.target.vocab_size)) if graphs is None else DeviceTrial(graphs)
        places = _same if graphs is None else nodes_of
        drafts = HostTrial(self.target, self.drafter) if graphs is None and self._drafts_alike else None
        if known is None or self._are_too_dear(known, passes, drafts, places):
            known = self._measured(passes, places) if graphs is not None else self._measured_apart(passes)
            if known is not None:
                keep_json(self.path, known.to_json())
        return known

    def doubt(self) -> None:
        self.known.by_path.pop(self.path, None)
        self.path.unlink(missing_ok=True)

    @property
    def _budget(self) -> float:
        return _BUDGET.get(self.target.device.type, _BUDGET["cpu"])

    def _measured(self, rounds: Trial, nodes_of: Callable[[int], int]) -> Prices | None:
        """Measured prices of whole rounds, on a device."""
        table = self._timed(rounds, _CAPTURED)
        drafts = {rows: {length: cost for length, cost in row.items() if length} for rows, row in table.items()}
        passes = {rows: {nodes_of(length): cost for length, cost in row.items()} for rows, row in table.items()}
        return _prices(passes, drafts)

    def _measured_apart(self, passes: Trial) -> Prices | None:
        """Measured prices of passes and of the drafter. A drafter that finds nothing in made-up text, or refuses it, has no
        price. One pass of a number of rows is no curve."""
        table = {rows: row for rows, row in self._timed(passes, _PASSES).items() if len(row) > 1}
        if not self._drafts_alike:
            return _prices(table, {})
        try:
            return _prices(table, self._timed(HostTrial(self.target, self.drafter), _DRAFTS))
        except OutriderError:
            return _prices(table, {})

    def _timed(self, trial: Trial, wanted: Wanted) -> Table:
        """Measure as many of the costs as there is time for. The first one may take half of the time at most; otherwise the
        rounds of real requests will tell."""
        end, table = self.clock() + self._budget, dict[int, dict[int, Cost]]()
        for rows, guesses in wanted:
            for length, cost in _until(trial.rounds(rows, guesses), lambda: self.clock() < end):
                table.setdefault(rows, {})[length] = cost
            if self.clock() > end - (0 if sum(map(len, table.values())) > 1 else self._budget / 2):
                break
        return table

    @property
    def _drafts_alike(self) -> bool:
        """Whether drafting made-up text costs what drafting real text costs."""
        return not (self.drafter.memories or self.drafter.never_guesses)

    def _are_too_dear(self, known: Prices, passes: Trial, drafts: Trial | None, nodes_of: Callable[[int], int]) -> bool:
        """Whether rounds or drafts take much less time than these prices say. A slow model is not checked, because serving
        would start late."""
        if len(_TRIED) * sum(known.passing(1, nodes_of(length)) for length in _TRIED) > self._budget / 2:
            return False
        if any(known.passing(1, nodes_of(length)) > _TOO_DEAR * cost.rest for length, cost in passes.rounds(1, _TRIED)):
            return True
        if drafts is None or not known.drafts:
            return False
        return any((known.drafting(1, length) or 0) > _TOO_DEAR * cost.draft for length, cost in drafts.rounds(1, _TRIED[1:]))


def _same(length: int) -> int:
    """The number of guesses of a chain is its length."""
    return length


def _until(costs: Iterator[tuple[int, Cost]], has_time: Callable[[], bool]) -> Iterator[tuple[int, Cost]]:
    """Yields items as long as there is time, and one more."""
    for cost in costs:
        yield cost
        if not has_time():
            return


def _prices(passes: Table, drafts: Table) -> Prices | None:
    """Prices from the measured costs; None if there was no time for two passes."""
    if sum(map(len, passes.values())) < 2:
        return None
    rest = {rows: {place: cost.rest for place, cost in row.items()} for rows, row in passes.items()}
    draft = {rows: {place: cost.draft for place, cost in row.items()} for rows, row in drafts.items() if len(row) > 1}
    return Prices(_surface(rest), _surface(draft))


def _surface(seconds: Mapping[int, Mapping[int, float]]) -> Surface:
    return tuple((rows, _points(seconds[rows])) for rows in sorted(seconds))


def _points(curve: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """Points by rising place. More work never takes less time, so a price is lowered to that of the next larger place if that
    was cheaper."""
    places = sorted(curve)
    return tuple((float(place), min(curve[later] for later in places[i:])) for i, place in enumerate(places))


def weight_of(name: str) -> str:
    """Identifies a model's files by their size in bytes, or by the name if there are no files here."""
    path = Path(name).expanduser()
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return str(sum(file.stat().st_size for file in files)) if files else name


def _stored(path: Path) -> Prices | None:
    try:
        return Prices.of_json(read_json(path))
    except (ValueError, TypeError):
        return None
