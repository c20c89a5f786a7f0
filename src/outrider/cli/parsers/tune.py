"""``outrider tune MODEL --prompts FILE``: which method, tree and length are fastest for these prompts on this machine?

    outrider tune bundled --prompts prompts.jsonl --out tuned.json
    outrider generate --config tuned.json "Once upon a time"

The command measures what passes cost and how many guesses of every lossless method are accepted. It states the speed-up it
expects, measures it, and writes a config. It says so when speculation does not pay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.bench.tune_config import TuneConfig
from outrider.cli.parsers.shared import add_key_storage


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("tune", description=__doc__)
    defaults = TuneConfig()
    parser.add_argument("model", help="folder, hub name or .gguf file; 'bundled' for the bundled pair")
    parser.add_argument("--prompts", required=True, metavar="FILE", help=".jsonl file, or a suite of `outrider bench`")
    parser.add_argument("--draft", action="append", metavar="NAME", help="draft model, repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the config goes (default: standard output only)")
    parser.add_argument(
        "--methods", default="all", help="names of `outrider methods`, with commas (default: all lossless ones)"
    )
    parser.add_argument("--num-prompts", type=int, default=8, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", "-n", type=int, default=defaults.max_tokens, help="tokens of a text")
    parser.add_argument("--temperature", "-t", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--batch-size", type=int, default=1, help="batch size")
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds, help="repetitions for the finalists")
    parser.add_argument("--seconds", type=float, help="approximate seconds for the final measurements")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    add_key_storage(parser)
    parser.add_argument("--threads", type=int, help="CPU threads")
