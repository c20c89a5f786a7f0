"""``outrider info MODEL``: what a checkpoint is, without loading its weights."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub name or .gguf file (default: the bundled target)")
    parser.add_argument("--json", action="store_true", help="print JSON")
