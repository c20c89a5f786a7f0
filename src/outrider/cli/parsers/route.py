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
    parser.add_argument("--router", choices=ROUTERS, default="random", help="who decides about a step")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="random: share of steps to escalate; rsd: escalates rewards up to this; arbitrage: probable gains above this",
    )
    parser.add_argument("--learned", type=Path, metavar="FILE", help="arbitrage: what `outrider train router` wrote")
    parser.add_argument("--reward", metavar="MODEL", help="rsd: the reward model; arbitrage: if learned with sees=reward")
    parser.add_argument("--good", default="", help="what it says after a good step (default: how likely it writes the step)")
    parser.add_argument("--bad", default="", help="what it says after a bad one")
    parser.add_argument("--end", default=r"\n\n", help=r"the end of a step; \n is a new line")
    parser.add_argument("--max-steps", type=int, default=32, help="steps of the text")
    parser.add_argument("--max-tokens", "-n", type=int, default=128, help="tokens of a step")
    parser.add_argument("--temperature", "-t", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
