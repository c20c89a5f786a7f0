"""``outrider demo``: the bundled models continue a story, plain and speculative side by side. It needs no download."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", description=__doc__)
    parser.add_argument("--max-tokens", "-n", type=int, default=120, help="tokens to generate")
