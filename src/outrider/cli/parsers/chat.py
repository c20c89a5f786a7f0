"""``outrider chat``: talk to a model in the terminal, with every token in the colour of its origin."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cli.parsers.shared import add_model_options, add_sampling_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", description=__doc__)
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message that every conversation begins with")
    parser.add_argument("--save-trace", type=Path, metavar="FILE", help="append every round, for `outrider viz`")
    parser.set_defaults(temperature=0.7)
