"""Runs ``outrider methods``: the tables, or one row in full."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from outrider.cli.explain import explain
from outrider.core.method_rows import MethodRow, RuleRow
from outrider.methods import METHODS, POLICIES, RULES


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        found = explain(arguments.name)
        print(json.dumps(found.to_json(), indent=2) if arguments.json else found.text())
        return 0
    tables = describe()
    if arguments.json:
        print(json.dumps(tables, indent=2))
        return 0
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, row in rows.items():
            _print_row(name, row)
    print("\n`outrider methods NAME` explains one: its options, what they mean, and an example")
    return 0


def _print_row(name: str, row: dict[str, Any]) -> None:
    mark = "" if row.get("lossless", True) else "  [lossy]"
    print(f"  {name:<17}{row['summary']}{mark}")
    label = "exact for" if row.get("lossless", True) else "guesses"
    details = {
        "options": ", ".join(row.get("options", [])),
        "keeps": row.get("keeps", ""),
        label: ", ".join(row.get("exact_for", [])),
        "paper": row.get("paper", "").strip("-"),
    }
    for label, text in details.items():
        if text:
            print(f"  {'':<17}  {label}: {text}")


def describe() -> dict[str, dict[str, dict[str, Any]]]:
    """The tables as plain data."""
    policies = {
        name: {"summary": row.summary, "options": [item.name for item in fields(row.options)]} for name, row in POLICIES.items()
    }
    return {
        "methods": {name: _method(row) for name, row in METHODS.items()},
        "acceptance rules": {name: _rule(row) for name, row in RULES.items()},
        "policies": policies,
    }


def _method(row: MethodRow) -> dict[str, Any]:
    return {
        "summary": row.summary,
        "paper": row.paper,
        "lossless": RULES[row.acceptance].rule.lossless,
        "keeps": RULES[row.acceptance].keeps,
        "acceptance": row.acceptance,
        "acceptances": [key for key, rule in RULES.items() if set(rule.rule.exact_for) & set(row.drafter.offers)],
        "options": [item.name for item in fields(row.options)] + (["draft"] if row.needs_draft else []),
    }


def _rule(row: RuleRow) -> dict[str, Any]:
    return {
        "summary": row.summary,
        "paper": row.paper,
        "lossless": row.rule.lossless,
        "keeps": row.keeps,
        "exact_for": [draws.value for draws in row.rule.exact_for],
        "options": [item.name for item in fields(row.options)],
        "shape": row.rule.shape.value,
    }
