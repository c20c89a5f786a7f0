"""``outrider inspect``: what a folder of draft heads is, and what is wrong with it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of heads")
    parser.add_argument("--json", action="store_true", help="print JSON")
