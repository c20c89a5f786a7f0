"""One sentence that says whether speculation paid, and why.

time of a round     = drafting + one pass over the root and its guesses
it pays if          tokens of a round  >  time of a round / time of a plain pass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.reason import Reason, ReasonCode
from outrider.core.request import Stats

_DECLINED = (ReasonCode.PLAIN_IS_FASTER, ReasonCode.BUDGET)
"""Reasons for which a policy declines to draft."""
_PAYS = 1.02
"""Smaller speed-ups are noise."""


@dataclass(frozen=True)
class Idle:
    """A text without any guess, generated again to learn the reason."""

    reason: Reason
    drafts: bool = False
    """Whether the second run had guesses."""


@dataclass(frozen=True)
class RoundMeans:
    """Mean cost of rounds in seconds, and the tokens they emitted."""

    nodes: float
    tokens: float
    score_seconds: float
    draft_seconds: float
    acceptance: float | None
    """Acceptance rate; None if no guess was tested."""

    @staticmethod
    def of(stats: Sequence[Stats]) -> RoundMeans:
        passes = max(1, sum(one.num_passes for one in stats))
        return RoundMeans(
            nodes=1 + sum(one.num_drafted for one in stats) / passes,
            tokens=sum(one.num_tokens for one in stats) / passes,
            score_seconds=sum(one.score_seconds for one in stats) / passes,
            draft_seconds=sum(one.draft_seconds for one in stats) / passes,
            acceptance=acceptance_of(stats),
        )


def acceptance_of(stats: Sequence[Stats]) -> float | None:
    """Acceptance rate; None if no guess was tested."""
    tested = sum(one.num_tested for one in stats)
    return sum(one.num_accepted for one in stats) / tested if tested else None


def share_text(share: float | None) -> str:
    """A share in percent, or a dash if there is none."""
    return "-" if share is None else f"{share:.0%}"


def verdict(
    plain: Sequence[Stats], fast: Sequence[Stats], *, speedup: float, device: str, identical: bool, idle: Idle | None = None
) -> str:
    """The last line of a comparison. ``idle`` explains a text without any guess."""
    same = "identical text" if identical else "DIFFERENT text (see docs/lossless.md on rounding)"
    before, after = RoundMeans.of(plain), RoundMeans.of(fast)
    if speedup >= _PAYS and after.tokens > before.tokens:  # without an accepted guess it is noise
        return f"{speedup:.2f}x faster than plain decoding, {same}"
    return f"No speed-up here ({speedup:.2f}x): {_reason(before, after, device, idle)}; {same}"


def _reason(plain: RoundMeans, fast: RoundMeans, device: str, idle: Idle | None) -> str:
    if fast.acceptance is None and idle is not None and idle.drafts:
        return f"no guess was made while it was timed, and the policy drafts now: this {device} was busier then; run it again"
    if fast.acceptance is None and idle is not None and idle.reason.code in _DECLINED:
        why = idle.reason.sentence.removesuffix(".")
        return f"no guess was made, for the policy expected none to pay on this {device}. {why}"
    if fast.acceptance is None:
        return "no guess was made on this text; try a method with a draft model, or a text that repeats itself"
    if not plain.score_seconds or not fast.score_seconds:  # rounds that are one graph are not timed in parts
        return f"a round gave {fast.tokens:.1f} tokens, less than it cost; `outrider tune` finds what pays"
    cost, drafting = fast.score_seconds / plain.score_seconds, fast.draft_seconds / plain.score_seconds
    what = f"a pass of {fast.nodes:.1f} tokens costs {cost:.1f} passes on this {device}"
    what += f" and its draft {drafting:.1f} more" if drafting >= 0.05 else ""
    return f"{what}, and gave {fast.tokens:.1f} tokens; {_advice(fast.acceptance, cost, drafting)}"


def _advice(acceptance: float, cost: float, drafting: float) -> str:
    if acceptance < 0.4:
        return f"{acceptance:.0%} of the guesses were right: try another method or draft model (`outrider tune` compares them)"
    if drafting > cost / 2:
        return "drafting is too dear: try a smaller draft model, or a method that copies (prompt-lookup, suffix)"
    return "try fewer guesses (-K 2), a larger model, or let `outrider tune` choose"
