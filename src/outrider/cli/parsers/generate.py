"""``outrider generate``: continue a prompt, watch where every token came from, compare with plain decoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from outrider.cli.parsers.shared import add_model_options, add_ray, add_sampling_options

STOPPING: dict[str, bool | Literal["never"]] = {"no": False, "yes": True, "never": "never"}
"""Choices of --early-stopping."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--lines", action="store_true", help="every line of the input is a prompt of its own")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    add_model_options(parser)
    add_sampling_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--show", action="store_true", help="show in colours where every token came from")
    group.add_argument("--compare", action="store_true", help="run plain decoding too, in turns, and print the speed-up")
    group.add_argument("--json", action="store_true", help="one JSON document instead of text")
    group.add_argument("--batch-size", type=int, help="requests that share target passes (default: 8; on a GPU, what fits)")
    group = parser.add_argument_group("beam search (deterministic; takes --max-tokens and none of the other sampling options)")
    group.add_argument("--num-beams", type=int, default=1, help="beams to keep; their texts are printed, best first")
    group.add_argument("--length-penalty", type=float, default=1.0, help="exponent of the length; above 0 favours long texts")
    group.add_argument(
        "--early-stopping", choices=list(STOPPING), default="no", help="whether to stop once enough texts are finished"
    )
    text = "where the answers go, a JSON line for each prompt"
    add_ray(parser).add_argument("--out", type=Path, metavar="FILE", help=text)
