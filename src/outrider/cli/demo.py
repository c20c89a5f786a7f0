"""Runs ``outrider demo``: ``outrider generate`` with a prompt of ours."""

from __future__ import annotations

import argparse

from outrider.cli import generate
from outrider.cli.parsers.generate import add_parser

_PROMPT = "Once upon a time, there was a little fox who"


def demo_words(max_tokens: int) -> list[str]:
    """The arguments of ``outrider demo``: ``outrider generate`` with our prompt, compared with plain decoding."""
    return ["generate", _PROMPT, "--max-tokens", str(max_tokens), "--show", "--compare"]


def run(arguments: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(prog="outrider")
    add_parser(parser.add_subparsers(dest="command"))
    return generate.run(parser.parse_args(demo_words(arguments.max_tokens)))
