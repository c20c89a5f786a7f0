"""``outrider why``: continue a prompt, and say in plain sentences why each round drafted what it did.

It can also explain a recorded run: ``outrider chat --save-trace FILE``, then ``outrider why --trace FILE``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cli.parsers.shared import add_model_options, add_sampling_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("why", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt to continue")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="explain the rounds of a trace file instead")
    parser.add_argument("--request", type=int, metavar="N", help="which request of the trace (default: the first in it)")
    parser.add_argument("--rounds", action="store_true", help="one line for every round, not only for every reason")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_model_options(parser)
    add_sampling_options(parser)
