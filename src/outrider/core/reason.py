"""Why a round drafted what it did, as a code with numbers and as one sentence.

A policy attaches a ``Reason`` to every plan. ``outrider why``, trace files, the page and the metrics read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import final


class ReasonCode(Enum):
    """What decided a plan. The value is a stable name for metrics and traces; ``sentence`` explains it with numbers."""

    GIVEN = "given"
    CALIBRATION = "calibration"
    FASTEST = "fastest"
    PLAIN_IS_FASTER = "plain-is-faster"
    BUDGET = "budget"
    PROMPTS = "prompts"
    PROBE = "probe"
    RULE = "rule"
    REQUEST_LIMIT = "request-limit"
    MEMORY = "memory"
    READING = "reading"
    FORCED = "forced"


_SENTENCES = {
    ReasonCode.GIVEN: "The draft length is fixed at {length:.0f}.",
    ReasonCode.CALIBRATION: "One of the first rounds: it drafts {length:.0f} to measure what such a round costs.",
    ReasonCode.FASTEST: (
        "Drafting up to {length:.0f} promises {gain:.2f}x the speed of plain decoding: {tokens:.2f} tokens for {cost:.2f} "
        "times the seconds of a plain round."
    ),
    ReasonCode.PLAIN_IS_FASTER: (
        "No draft length promises to beat plain decoding. The best is {length:.0f} with {gain:.2f}x: {tokens:.2f} tokens for "
        "{cost:.2f} times the seconds of a plain round."
    ),
    ReasonCode.BUDGET: (
        "Drafting is paused: it lost time against plain decoding, and the budget for that is {budget:.1f} plain rounds. It "
        "would promise {gain:.2f}x."
    ),
    ReasonCode.PROMPTS: (
        "Prompts wait to be read, and answers cannot come faster than prompts are read. A round without guesses is the "
        "shortest."
    ),
    ReasonCode.PROBE: "A probe: it drafts {length:.0f} instead of {best:.0f} to learn what that is worth.",
    ReasonCode.RULE: "The policy's rule gives a draft length of up to {length:.0f}.",
    ReasonCode.REQUEST_LIMIT: "The request allows at most {limit:.0f} guesses.",
    ReasonCode.MEMORY: "Memory leaves room for {room:.0f} guesses.",
    ReasonCode.FORCED: "The grammar forces up to {length:.0f} tokens, so they are the draft.",
    ReasonCode.READING: "The draft model is still reading the prompt, {tokens:.0f} tokens in a round.",
}


@final
@dataclass(frozen=True)
class Reason:
    """Why a plan is as it is."""

    code: ReasonCode
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the sentence, by name."""

    @property
    def sentence(self) -> str:
        """The reason as one sentence."""
        return _SENTENCES[self.code].format(**self.numbers)

    def to_json(self) -> dict[str, object]:
        return {"code": self.code.value, "numbers": dict(self.numbers), "sentence": self.sentence}
