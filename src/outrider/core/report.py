"""A round as a value: what was planned, guessed, accepted and emitted, and what it cost.

``Engine.step`` and the scheduler return it. Statistics, traces, metrics, the bench and the audit read it, so nobody has to
watch the engine at work or compare counters before and after.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.interfaces import Observation
from outrider.core.reason import Reason
from outrider.core.request import Origin, RequestState
from outrider.core.trace import Round


@final
@dataclass(frozen=True, eq=False)
class RoundReport:
    """One round of a batch. Every sequence has one entry per row."""

    ids: Sequence[int]
    """The caller's number for each request."""
    states: Sequence[RequestState]
    """The requests, after the round."""
    positions: Sequence[int]
    """Output position from which each row started."""
    seen: Observation
    """The plan, the draft tree, the scores, the accepted paths, and the seconds of drafting and scoring."""
    drafted: Sequence[int]
    """Guesses of each row."""
    rejected: Sequence[bool]
    """True where the path ended because the target refused a guess."""
    emitted: Sequence[list[int]]
    """Tokens appended to the output. A stop may cut an accepted run short."""
    seconds: float
    """Wall time of the round, planning included."""
    lane: Hashable = None
    """Name of the method, if a scheduler runs several."""
    layout_seconds: float = 0.0
    """Time spent arranging rows before the round."""

    @property
    def accepted(self) -> Sequence[int]:
        """Accepted guesses of each row."""
        return self.seen.num_accepted

    @property
    def reason(self) -> Reason | None:
        """Why the policy planned this round as it did."""
        return self.seen.plan.reason if self.seen.plan else None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by all rows."""
        return sum(map(len, self.emitted))

    def progress(self) -> Iterator[Progress]:
        """The round from each request's view."""
        for row in range(len(self.ids)):
            yield Progress(self, row)

    def count(self) -> None:
        """Add the round to the statistics of its requests."""
        seen = self.seen
        counts = zip(self.states, self.drafted, seen.num_accepted, self.rejected, self.emitted, strict=True)
        for state, drafted, accepted, rejected, emitted in counts:
            stats = state.stats
            stats.num_passes += 1
            stats.num_drafted += drafted
            stats.num_accepted += accepted
            stats.num_tested += accepted + rejected
            stats.num_tokens += len(emitted)
            stats.draft_seconds += seen.draft_seconds
            stats.score_seconds += seen.score_seconds
            stats.seconds += self.seconds


@final
@dataclass(frozen=True, eq=False)
class Progress:
    """The effect of one round on one request."""

    report: RoundReport
    row: int

    @property
    def request(self) -> int:
        """The caller's number for the request."""
        return self.report.ids[self.row]

    @property
    def state(self) -> RequestState:
        return self.report.states[self.row]

    @property
    def new_tokens(self) -> list[int]:
        return self.report.emitted[self.row]

    @property
    def origins(self) -> list[Origin]:
        """Where each new token came from."""
        start = self.report.positions[self.row]
        return self.state.origins[start : start + len(self.new_tokens)]

    @property
    def trace(self) -> Round:
        """The round as pictures and trace files read it."""
        report, row = self.report, self.row
        seen, tree = report.seen, report.seen.draft.tree
        size = tree.sizes[row]
        return Round(
            request=self.request,
            position=report.positions[row],
            tokens=tree.tokens[row, :size].tolist(),
            parents=tree.parents[row, :size].tolist(),
            path=list(seen.paths[row][1:]),
            emitted=self.new_tokens,
            origins=self.origins,
            draft_seconds=seen.draft_seconds,
            score_seconds=seen.score_seconds,
            seconds=report.seconds,
            reason=report.reason,
        )
