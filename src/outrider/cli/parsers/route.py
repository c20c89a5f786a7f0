"""``outrider route PROMPT`` (LOSSY): a small model writes whole steps, and a router decides which the target writes again.

outrider route "..." --model MODEL --draft SMALL --router random --threshold 0.3
outrider route "..." --model MODEL --draft SMALL --router rsd --reward JUDGE --good yes --bad no --threshold 0.5
outrider route "..." --model MODEL --draft SMALL --router arbitrage --learned runs/router.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROUTERS = ("random", "rsd", "arbitrage")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("route", description=__doc__)
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--model", metavar="MODEL", help="folder, hub name or .gguf file (default: the bundled target)")
    parser.add_argument("--draft", metavar="MODEL", help="the small model (default: the bundled draft)")
    parser.add_argument(
        "--router", choices=ROUTERS, default="random", help="how it is decided which steps the target writes again"
    )
    text = (
        "steps that the target writes again. random: this share; rsd: rewards up to this; arbitrage: predicted gains above this"
    )
    parser.add_argument("--threshold", type=float, default=0.5, help=text)
    parser.add_argument("--learned", type=Path, metavar="FILE", help="arbitrage: the file that `outrider train router` wrote")
    parser.add_argument(
        "--reward",
        metavar="MODEL",
        help="the reward model: always for rsd, and for arbitrage if it was trained with sees=reward",
    )
    parser.add_argument(
        "--good",
        default="",
        help="what the reward model writes after a good step (default: none; the reward is how likely it finds the step)",
    )
    parser.add_argument("--bad", default="", help="what the reward model writes after a bad step")
    parser.add_argument("--end", default=r"\n\n", help=r"the end of a step; \n is a new line")
    parser.add_argument("--max-steps", type=int, default=32, help="most steps of the text")
    parser.add_argument("--max-tokens", "-n", type=int, default=128, help="most tokens of a step")
    parser.add_argument("--temperature", "-t", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
