"""``outrider train``: heads and draft models for a target, and training text in the target's own words."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cli.parsers.shared import add_ray

TRAINABLE = (
    "medusa hydra eagle1 eagle3 fspad falcon chimera mlp-speculator redrafter mtp mtp-parallel l-mtp p-eagle dflash dspark "
    "longspec msd vispec specvlm distill adaspec pretrain sorted kangaroo layerskip medusa2 acceptance-head specee judge "
    "regenerate router"
).split()
"""Kinds of heads, other drafters, and tasks. ``cli/train.py`` knows how each is trained."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", description=__doc__)
    text = f"one of {', '.join(TRAINABLE)}, or several heads with commas between them"
    parser.add_argument("method", help=text)
    parser.add_argument("--target", metavar="MODEL", help="folder, hub name or .gguf file (default: the bundled model)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".npy, .jsonl or text")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the checkpoints; a run found there is resumed"
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="the draft model to start from; for acceptance-head, the draft whose guesses are judged",
    )
    parser.add_argument("--reference", metavar="MODEL", help="adaspec: the distilled model whose losses choose the tokens")
    parser.add_argument(
        "--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="any setting of the run; see docs/train.md"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--max-len", type=int, default=512, help="tokens per document; longer ones are cut")
    parser.add_argument("--held-out", type=int, default=32, help="held-out documents for evaluation")
    group = parser.add_argument_group("regenerate")
    group.add_argument("--max-tokens", type=int, default=256, help="tokens of a text")
    group.add_argument("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy")
    group.add_argument("--prompt-len", type=int, default=16, help="prompt tokens of each text")
    group.add_argument(
        "--method-of-writing", default=None, metavar="METHOD", help="method that generates the text (default: the usual one)"
    )
    add_ray(parser)
