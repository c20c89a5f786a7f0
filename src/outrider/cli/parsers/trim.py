"""``outrider trim``: restricts a draft model or trained heads to the commonest tokens, which makes drafting cheaper."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("trim", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="a draft model, or heads")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".npy, .jsonl or text")
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="number of tokens it can produce")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR-N)")
    parser.add_argument("--target", metavar="MODEL", help="target of the heads (default: the bundled model)")
