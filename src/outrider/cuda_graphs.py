"""Which methods run as captured rounds on a GPU, and the choice between them and the engine.

Target, drafter, rule and policy each declare whether they can be part of a captured round. If all parts of a method can, each
of its rounds is one CUDA graph (``engine/device_lane.py``). Other methods, and requests whose sampling needs the host (a logits
processor), run on the engine, whose passes are graphs too. The text is the same either way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final
from weakref import WeakKeyDictionary

from tqdm import tqdm

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.report import Progress
from outrider.core.request import Request
from outrider.engine.generate import run
from outrider.engine.round_kind import frame_sizes, num_slots
from outrider.engine.step import Engine

if TYPE_CHECKING:
    from outrider.engine.captured_rounds import RoundGraphs
    from outrider.engine.device_lane import DeviceLane


_ON_A_CPU = 8
"""Default number of requests at once on a CPU, where the cost of a pass grows with its rows, and where rounds cannot be
captured."""
_MOST = 512
_SPARE = 320
"""Number of tokens that a row has room for after its text."""


@final
class Rounds:
    """Runs requests on one target, in the fastest way that a method allows."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._graphs: WeakKeyDictionary[Method, RoundGraphs | None] = WeakKeyDictionary()

    def run(
        self, method: Method, requests: Sequence[Request], *, max_batch_size: int | None = None, traced: bool = False
    ) -> Iterator[Progress]:
        """Run requests like ``engine.generate.run``. Without ``max_batch_size``, as many run at once as pay. With ``traced``,
        every round reports its tree."""
        lane = None if traced else self.lane
        max_batch_size = max_batch_size or self._most_rows(requests)
        yield from run(Engine(self._target, method), requests, max_batch_size=max_batch_size, device_lane=lane)

    def _most_rows(self, requests: Sequence[Request]) -> int:
        """Most requests at once: a few on a CPU; on a GPU, as many as its pages hold. If texts grow longer than expected, some
        wait for others."""
        if self._target.device.type != "cuda" or not self._target.captured_as.traits.can_be_captured:
            return _ON_A_CPU
        lengths = [min(len(one.prompt_ids) + one.params.max_tokens, self._target.max_len) + _SPARE for one in requests] or [1]
        room = cast(Any, self._target.captured_as).room * len(lengths) // sum(lengths)
        return max(1, min(_MOST, 1 << max(0, room.bit_length() - 1)))

    def lane(self, method: Method) -> DeviceLane | None:
        """A new lane of the method's captured rounds; None where they cannot be captured."""
        graphs = self.graphs_of(method)
        if graphs is None:
            return None
        from outrider.engine.device_lane import DeviceLane

        return DeviceLane(graphs)

    def prepare(
        self, method: Method, sizes: Collection[int] = (1,), *, comes_at_once: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Compile and capture what so many requests would wait for; yields how many rounds are ready, and of how many. Where a
        batch ``comes_at_once``, its rounds read no prompts, and the frame shrinks as requests end. Nothing to do where rounds
        are not captured."""
        graphs = self.graphs_of(method)
        if graphs is None or graphs.is_held_by_another(self):
            return
        method.policy.start(1)  # it reads its prices now, before anybody waits
        from outrider.engine.device_seats import NUM_PIECES

        frames = {frame for size in sizes for frame in (frame_sizes(size) if comes_at_once else [num_slots(size)])}
        pieces = {frame: NUM_PIECES[:1] if comes_at_once and frame > 1 else NUM_PIECES for frame in frames}
        total, count = sum(len(kinds) for frame, some in pieces.items() for kinds in graphs.kinds(frame, some)), 0
        for frame in sorted(frames, reverse=True):
            for _ in graphs.prepare(frame, pieces=pieces[frame]):
                count += 1
                yield count, total

    def warm_up(self, method: Method, sizes: Collection[int], *, progress: bool) -> None:
        """Prepare rounds of so many requests."""
        with tqdm(disable=not progress, unit="round", desc="preparing") as bar:
            for _, bar.total in self.prepare(method, sizes):
                bar.update()

    def graphs_of(self, method: Method) -> RoundGraphs | None:
        """The method's captured rounds; None where the host drives them."""
        if self._target.device.type != "cuda":
            return None
        if method not in self._graphs:
            self._graphs[method] = captured(method, self._target)
        return self._graphs[method]


def captured(method: Method, target: Target) -> RoundGraphs | None:
    """The method as captured rounds; None where a part of it has no twin on the device. A rule without a twin walks on the
    host, between the pass of a round and its commit: then the host drafts, too."""
    shape = method.policy.captured_shape()
    fast, pairs = cast(Any, target.captured_as), target.traits.captured_pairs
    if shape is None or not fast.traits.can_be_captured:
        return None
    rule = None if method.rule.can_be_captured else method.rule
    from outrider.engine.captured_rounds import RoundGraphs
    from outrider.models.rank_sums import ALONE

    if method.drafter.never_guesses and rule is None:
        return RoundGraphs(fast, None, method.policy, CapturedShape({}), pairs=pairs)
    twin = method.drafter.device_twin(shape, fast) if rule is None else None
    if twin is not None:
        return RoundGraphs(fast, twin, method.policy, shape, pairs=pairs)
    if not method.drafter.drafts_alone or (rule is not None and fast.joint is not ALONE):
        return None
    from outrider.engine.between_rounds import BetweenRounds

    beside = BetweenRounds(method.drafter, shape, fast, rule)
    return RoundGraphs(fast, beside, method.policy, shape, beside=beside, pairs=pairs)
