"""``outrider demo``: the bundled models continue a story, plain and speculative side by side. It needs no download."""

from __future__ import annotations

import argparse

from outrider.cli import generate
from outrider.cli.parser import Parser

_PROMPT = "Once upon a time, there was a little fox who"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", description=__doc__)
    parser.add_argument("--max-tokens", "-n", type=int, default=120, help="tokens to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The same as ``outrider generate`` with a prompt of ours, ``--show`` and ``--compare``."""
    parser = Parser(prog="outrider")
    generate.add_parser(parser.add_subparsers(dest="command"))
    words = ["generate", _PROMPT, "--max-tokens", str(arguments.max_tokens), "--show", "--compare"]
    return generate.run(parser.parse_args(words))
