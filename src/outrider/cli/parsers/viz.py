"""``outrider viz``: a recorded trace as one HTML file that replays it, round by round."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("viz", description=__doc__)
    parser.add_argument("trace", type=Path, help="rounds, one per line: saved by the server's page or `chat --save-trace`")
    parser.add_argument("--output", "-o", type=Path, help="the page to write (default: beside the trace)")
    parser.add_argument("--request", type=int, help="which request of the trace (default: the first)")
    parser.add_argument("--model", help="a model whose tokenizer turns ids into words, where the trace has none")
