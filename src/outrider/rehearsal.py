"""A rehearsal: rounds of a made-up request, timed before real ones are served, so that a policy knows its prices.

Passes are timed with made-up chains of 1 to 64 nodes, drafting with the method's own drafter. A price is the least of a few
rounds, since neighbours only ever add to it. The result is kept in the cache folder, beside the native build, under a name made
of the machine, the models, the method and the version. A file that cannot be read is ignored and written anew. Prices that were
kept are tried: where a pass takes much less than they say, they were measured beside other work, and are measured again.
Nothing that was emitted is kept, and a drafter that learns across requests is left out, so a rehearsal changes no text and no
guess.

On a GPU there is no rehearsal: rounds are captured there, and cost something else than rounds that the host drives.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.coupled import Coupled
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OutriderError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Policy, Stateless, Target
from outrider.core.kept_json import keep_json, read_json
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.prices import Prices, PriceSource
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.core.version import VERSION
from outrider.engine.step import Engine
from outrider.models.native import cache_folder, isa_here, processor

_WIDTHS = (1, 8, 64, 4, 16, 32, 2)
"""Nodes of the passes that are timed, the most telling first, for a model that is slow."""
_GUESSES = {1: (1, 2, 4, 8), 8: (1, 4)}
"""Guesses along a path that drafting is timed with, by the rows that share a round."""
_REPEATS = 4
"""Rounds of a price. The first is not counted: a pass of another width than the ones before is slow."""
_TRIED, _TOO_DEAR = (1, 8), 1.25
"""Nodes of the passes that kept prices are tried with, and how many times what a pass takes now they may say."""
_PROMPT_LEN = 16
_BUDGET = 0.3
"""Seconds after which no further pass, and no further draft, is timed. It may be exceeded by the rounds of one price."""
_SHORTEST_CONTEXT = 256


@final
@dataclass(frozen=True, eq=False)
class Rehearsal(PriceSource):
    """The prices of a method on a target, from the cache folder or from a rehearsal."""

    target: Target
    drafter: Drafter
    label: Mapping[str, Any]
    """What tells the models and the method from others."""
    folder: Path = field(default_factory=cache_folder)
    clock: Callable[[], float] = perf_counter

    @property
    def path(self) -> Path:
        """Where these prices are kept."""
        target = self.target
        shape = [type(target).__name__, target.num_layers, target.vocab_size, target.max_len, str(target.dtype)]
        machine = [processor(), isa_here().flags, torch.get_num_threads(), os.environ.get("OUTRIDER_NATIVE", "")]
        label = {name: value for name, value in self.label.items() if isinstance(value, str | int | float | list)}
        key = json.dumps([VERSION, torch.__version__, machine, shape, type(self.drafter).__name__, label], default=str)
        return self.folder / f"prices-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"

    def read(self, nodes_of: Callable[[int], int]) -> Prices | None:
        if not _can_rehearse(self.target):
            return None
        known = _stored(self.path)
        if known is None or _are_too_dear(self.target, known):
            known = measure(self.target, self.drafter, nodes_of, clock=self.clock)
            if known is not None:
                keep_json(self.path, known.to_json())
        return known

    def doubt(self) -> None:
        self.path.unlink(missing_ok=True)


def measure(
    target: Target, drafter: Drafter, nodes_of: Callable[[int], int], *, clock: Callable[[], float] = perf_counter
) -> Prices | None:
    """Time a few rounds; None where not even two widths could be timed in the time there is."""
    began = clock()
    passes: dict[int, float] = {}
    for width in _WIDTHS:
        if clock() - began > (_BUDGET if len(passes) > 1 else _BUDGET / 2):
            break
        passes[width] = _passing(target, width)
    if len(passes) < 2:
        return None
    end = clock() + _BUDGET
    learns = bool(drafter.memories) or drafter.never_guesses
    drafts = {} if learns else _drafting(target, drafter, nodes_of, lambda: clock() < end)
    return Prices(_points(passes), tuple((rows, _points(curve)) for rows, curve in sorted(drafts.items())))


def _passing(target: Target, width: int) -> float:
    """Seconds of a pass of so many nodes, its walk and its commit."""
    seen = _rounds(target, _Chains(), [width - 1] * _REPEATS, lambda length: length)[1:]
    return min(one.seconds - one.draft_seconds for one in seen)


def _are_too_dear(target: Target, known: Prices) -> bool:
    """Whether passes take much less than these prices say. A slow model is not asked: it would begin late."""
    if _REPEATS * sum(map(known.passing, _TRIED)) > _BUDGET:
        return False
    return any(known.passing(width) > _TOO_DEAR * _passing(target, width) for width in _TRIED)


def _drafting(
    target: Target, drafter: Drafter, nodes_of: Callable[[int], int], has_time: Callable[[], bool]
) -> dict[int, dict[int, float]]:
    """Seconds of drafting by rows and guesses. A drafter that finds nothing in made-up text, or refuses it, has no price."""
    found: dict[int, dict[int, float]] = {}
    for num_rows, lengths in _GUESSES.items():
        if not has_time():
            break
        script = [1, *(length for length in lengths for _ in range(_REPEATS))]
        try:
            seen = _rounds(target, drafter, script, nodes_of, num_rows=num_rows)
        except OutriderError:
            return {}
        for length in lengths:
            same = [one for asked, one in zip(script[1:], seen[1:], strict=True) if asked == length]
            if all(min(one.draft.tree.sizes) > 1 for one in same):
                found.setdefault(num_rows, {})[length] = min(one.draft_seconds for one in same)
    return {rows: curve for rows, curve in found.items() if len(curve) > 1}


def _rounds(
    target: Target, drafter: Drafter, lengths: Sequence[int], nodes_of: Callable[[int], int], *, num_rows: int = 1
) -> list[Observation]:
    """Rounds of made-up requests that draft these lengths."""
    plans = [Plan((length,) * num_rows, (nodes_of(length),) * num_rows) for length in lengths]
    engine = Engine(target, Method(drafter, Coupled(), _Script(plans)))
    params = SamplingParams(max_tokens=target.max_len, ignore_eos=True)
    prompt = [1 + token % (target.vocab_size - 1) for token in range(_PROMPT_LEN)]
    batch = engine.start([Request(prompt, params)] * num_rows)
    return [engine.step(batch).seen for _ in plans]


@final
class _Script(Policy):
    """Given plans, one after the other."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = iter(plans)

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state, num_rows
        return next(self._plans)

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation


@final
class _Chains(Drafter):
    """Guesses a chain of one token, whatever the text."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        rows = [[root, *[0] * plan.max_depth[0]] for root in context.roots]
        return Draft(TokenTree.chain(torch.tensor(rows, device=context.device)), self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        del state, observation


def weight_of(name: str) -> str:
    """What tells a model's files from others of another size: their bytes, or the name where there are none here."""
    path = Path(name).expanduser()
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return str(sum(file.stat().st_size for file in files)) if files else name


def _can_rehearse(target: Target) -> bool:
    """It reads plain tokens, has room for some, and the host drives its rounds."""
    return target.device.type == "cpu" and not target.traits.reads_whole and target.max_len >= _SHORTEST_CONTEXT


def _points(curve: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """By rising place. More work never takes less time, so a place takes at most what later ones do."""
    places = sorted(curve)
    return tuple((float(place), min(curve[later] for later in places[i:])) for i, place in enumerate(places))


def _stored(path: Path) -> Prices | None:
    try:
        return Prices.of_json(read_json(path))
    except (ValueError, TypeError):
        return None
