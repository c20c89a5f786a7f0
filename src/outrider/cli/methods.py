"""``outrider methods``: the tables of methods, acceptance rules and policies."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from outrider.methods import METHODS, POLICIES, RULES


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("methods", help="list methods, acceptance rules and policies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    tables = describe()
    if arguments.json:
        print(json.dumps(tables, indent=2))
        return 0
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, row in rows.items():
            mark = "" if row.get("lossless", True) else "  [lossy]"
            print(f"  {name:<17}{row['summary']}{mark}")
            label = "exact for" if row.get("lossless", True) else "guesses"
            details = {"options": ", ".join(row.get("options", [])), label: ", ".join(row.get("exact_for", []))}
            details["paper"] = row.get("paper", "").strip("-")
            for label, text in details.items():
                if text:
                    print(f"  {'':<17}  {label}: {text}")
    return 0


def describe() -> dict[str, dict[str, dict[str, Any]]]:
    """The tables as plain data."""
    methods = {
        name: {
            "summary": row.summary,
            "paper": row.paper,
            "lossless": RULES[row.acceptance].rule.lossless,
            "acceptance": row.acceptance,
            "acceptances": [key for key, rule in RULES.items() if set(rule.rule.exact_for) & set(row.drafter.offers)],
            "options": [item.name for item in fields(row.options)] + (["draft"] if row.needs_draft else []),
        }
        for name, row in METHODS.items()
    }
    rules = {
        name: {
            "summary": row.summary,
            "paper": row.paper,
            "lossless": row.rule.lossless,
            "exact_for": [draws.value for draws in row.rule.exact_for],
            "options": [item.name for item in fields(row.options)],
            "shape": row.rule.shape.value,
        }
        for name, row in RULES.items()
    }
    policies = {
        name: {"summary": row.summary, "options": [item.name for item in fields(row.options)]} for name, row in POLICIES.items()
    }
    return {"methods": methods, "acceptance rules": rules, "policies": policies}
