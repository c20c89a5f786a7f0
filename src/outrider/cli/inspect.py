"""``outrider inspect``: what a folder of draft heads is, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from outrider.models.heads.inspect import inspect_folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of heads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


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
