"""``outrider export``: writes a folder of draft heads in the format of another engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.models.heads import load_head
from outrider.models.heads.export import FORMATS, export_head


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the heads")
    parser.add_argument("format", metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR-FORMAT)")
    parser.add_argument("--target", metavar="MODEL", help="the target, where the heads leave parts to it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.folder.with_name(f"{arguments.folder.name}-{arguments.format}")
    head = load_head(arguments.folder, ends=arguments.target)
    export_head(head, out, form=arguments.format, target_name=arguments.target or "target")
    print(out)
    return 0
