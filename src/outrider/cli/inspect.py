"""``outrider inspect``: what a folder of draft heads is, and what is wrong with it; ``--export`` writes it for others."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from outrider.models.heads import load_head
from outrider.models.heads.export import FORMATS, export_head
from outrider.models.heads.inspect import inspect_folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of heads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--export", metavar="FORMAT", help=f"write it for another engine: {', '.join(FORMATS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where --export writes")
    parser.add_argument("--target", metavar="MODEL", help="the target, where the folder leaves parts to it")
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
    if arguments.export:
        out = arguments.out or arguments.folder.with_name(f"{arguments.folder.name}-{arguments.export}")
        head = load_head(arguments.folder, ends=arguments.target)
        export_head(head, out, form=arguments.export, target_name=arguments.target or "target")
        print(f"  written       {out}")
    return 1 if report.problems else 0
