"""Runs ``outrider demo``: ``outrider generate`` with a prompt of ours."""

from __future__ import annotations

import argparse

from outrider.cli import generate
from outrider.cli.parsers.generate import add_parser

_PROMPT = "Once upon a time, there was a little fox who"


def run(arguments: argparse.Namespace) -> int:
    """The same as ``outrider generate`` with a prompt of ours, ``--show`` and ``--compare``."""
    parser = argparse.ArgumentParser(prog="outrider")
    add_parser(parser.add_subparsers(dest="command"))
    words = ["generate", _PROMPT, "--max-tokens", str(arguments.max_tokens), "--show", "--compare"]
    return generate.run(parser.parse_args(words))
