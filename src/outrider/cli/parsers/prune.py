"""``outrider prune``: makes a draft model out of a larger one, from the layers and MLP units that matter most on real text."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prune", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name (default: the bundled target)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".npy, .jsonl or text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the draft model")
    parser.add_argument("--layers", type=int, required=True, metavar="N", help="number of layers to keep")
    parser.add_argument("--mlp", type=int, metavar="M", help="number of units to keep in every MLP (default: all)")
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="number of texts to read")
    parser.add_argument("--max-len", type=int, default=256, help="tokens per text")
