"""Findings of an audit, one for each check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class AuditOutcome(Enum):
    """Outcome of a check."""

    PASSED = "pass"
    FAILED = "FAIL"
    SKIPPED = "skip"
    """The check does not apply, or could not be run; the finding says why."""


@dataclass(frozen=True)
class Finding:
    """A check and its result."""

    part: str
    outcome: AuditOutcome
    said: str
    """One sentence with the figures."""
    details: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "outcome": self.outcome.value, "said": self.said, "details": list(self.details), **self.data}


@dataclass(frozen=True)
class Audit:
    """All findings."""

    label: str
    declared_lossless: bool
    findings: tuple[Finding, ...]

    @property
    def violated(self) -> bool:
        """Whether something was found that no lossless method does."""
        return any(finding.outcome is AuditOutcome.FAILED for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.violated and not self.declared_lossless:
            return f"{self.label} is LOSSY, as declared"
        return f"{self.label} is NOT LOSSLESS here" if self.violated else f"{self.label}: no violation found"

    def text(self) -> str:
        """Text for a terminal."""
        rows: list[str] = []
        for finding in self.findings:
            rows.append(f"{finding.outcome.value:<6}{finding.part:<14}{finding.said}")
            rows += [f"{'':<20}{line}" for line in finding.details]
        return "\n".join([*rows, "", self.verdict])

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "declared_lossless": self.declared_lossless,
            "violated": self.violated,
            "findings": [finding.to_json() for finding in self.findings],
        }


def passed(part: str, said: str, **data: Any) -> Finding:
    return Finding(part, AuditOutcome.PASSED, said, data=data)


def failed(part: str, said: str, details: Sequence[str] = (), **data: Any) -> Finding:
    return Finding(part, AuditOutcome.FAILED, said, details, data)


def skipped(part: str, why: str) -> Finding:
    return Finding(part, AuditOutcome.SKIPPED, why)
