"""Audits everything: every method with its own rule, and every rule once more.

A rule is audited with the first method whose guesses it can accept and that grows its shape, so that rules for trees get trees.
Lossless methods must pass. Lossy ones must be flagged, with the distance by enumeration and the bias of their text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.api import LLM
from outrider.bench.audit.audit import audit
from outrider.bench.audit.config import AuditConfig
from outrider.bench.audit.findings import Audit, AuditOutcome, Finding
from outrider.bench.settings import BASELINE, Setting, Skipped, runnable
from outrider.methods import METHODS, RULES


@dataclass(frozen=True)
class Catalogue:
    """Results of all audits."""

    audits: tuple[Audit, ...]
    skipped: tuple[Skipped, ...]

    @property
    def wrong(self) -> list[Audit]:
        """Audits of lossless methods that found a violation, and of lossy methods that found none."""
        return [one for one in self.audits if one.violated is one.declared_lossless]

    def text(self) -> str:
        rows = [_line(one) for one in self.audits]
        rows += [f"{'skip':<7}{skip.label:<30}{skip.reason}" for skip in self.skipped]
        exact = [one for one in self.audits if one.declared_lossless]
        flagged = [one for one in self.audits if not one.declared_lossless and one.violated]
        lossy = len(self.audits) - len(exact)
        passing = sum(not one.violated for one in exact)
        verdict = f"{passing} of {len(exact)} lossless settings pass, {len(flagged)} of {lossy} lossy ones are flagged"
        return "\n".join([*rows, "", verdict])

    def to_json(self) -> dict[str, Any]:
        skipped = [{"label": skip.label, "reason": skip.reason} for skip in self.skipped]
        return {"audits": [one.to_json() for one in self.audits], "skipped": skipped, "wrong": [o.label for o in self.wrong]}


def every_setting(llm: LLM, provide: Callable[[str], Any], policy: str | None) -> tuple[list[Setting], list[Skipped]]:
    """Methods with their own rules, then rules with a method that tests them, as far as these models allow."""
    rows, skipped = runnable(llm, [Setting(name, None, policy) for name in METHODS], provide)
    for rule in RULES:
        candidates = [Setting(one.method, rule, policy, one.options) for one in rows if one.method != BASELINE]
        fitting = [one for one in candidates if METHODS[one.method].drafter.shape is RULES[rule].rule.shape]
        found = next((one for one in fitting if runnable(llm, [one], provide)[0]), None)
        if found is None:
            skipped.append(Skipped(rule, _why_left_out(rule)))
        else:
            rows.append(found)
    return rows, skipped


def _why_left_out(rule: str) -> str:
    if RULES[rule].needs:
        return f"the rule needs {', '.join(RULES[rule].needs)}=, and nothing was given"
    return "no row of its shape makes guesses that it takes on these models"


def audit_all(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    provide: Callable[[str], Any],
    config: AuditConfig,
    policy: str | None = "fixed",
    say: Callable[[str], None] = lambda _: None,
) -> Catalogue:
    """Run all audits. ``say`` receives each result."""
    settings, skipped = every_setting(llm, provide, policy)
    audits: list[Audit] = []
    for setting in settings:
        audits.append(audit(llm, setting, prompts, config=config))
        say(_line(audits[-1]))
    return Catalogue(tuple(audits), tuple(skipped))


def _line(one: Audit) -> str:
    """An audit in one line: what failed, or what was checked."""
    findings = {finding.part: finding for finding in one.findings}
    if one.violated and one.declared_lossless:
        said = "; ".join(f"{part}: {found.said}" for part, found in findings.items() if found.outcome is AuditOutcome.FAILED)
        return f"{'FAIL':<7}{one.label:<30}{said}"
    if not one.declared_lossless:
        proof, law = findings["proof"].data, findings["law"].data
        flag = "lossy" if one.violated else "MISSED"
        loss = findings["loss"].data if "loss" in findings else None
        here = f"one-step TV {loss['tv_mean']:.3f} here (most {loss['tv_max']:.2f}), " if loss else ""
        said = f"{here}{proof['mean_distance']:.3f} by enumeration; an event of its text is off by {law['distance']:.3f}"
        return f"{flag:<7}{one.label:<30}{said}"
    return f"{'pass':<7}{one.label:<30}{_looked_at(findings)}"


def _looked_at(findings: dict[str, Finding]) -> str:
    greedy, law, seeds = (findings[part] for part in ("greedy", "law", "same seed"))
    texts = f"{greedy.data['identical']} of {greedy.data['texts']} greedy texts identical"
    seeded = f", {seeds.data['identical']} of {seeds.data['texts']} seeded" if "identical" in seeds.data else ""
    evidence = f"evidence {law.data['evidence']:.2g} of {1 / law.data['alpha']:.0g}"
    return f"{texts}{seeded}; law of {law.data['count']} tokens, {evidence}"
