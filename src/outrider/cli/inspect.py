"""Runs ``outrider inspect``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from outrider.models.heads.inspect import inspect_folder


def run(arguments: argparse.Namespace) -> int:
    report = inspect_folder(arguments.folder)
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        for name, value in report.facts.items():
            print(f"  {name:<14}{value:,}" if isinstance(value, int) else f"  {name:<14}{value}")
        for note in report.notes:
            print(f"  note          {note}")
        for problem in report.problems:
            print(f"  PROBLEM       {problem}")
    return 1 if report.problems else 0
