"""``outrider bench``: measures every method against plain decoding, in turns in one process, with intervals.

outrider bench                                        the bundled pair, every method, every suite
outrider bench --model DIR --draft DIR --suites chat,code,prompts.jsonl --methods suffix,draft-model -K 3,5
outrider bench --seconds 300 --json out.json --html out.html
outrider bench compare old.json new.json              exit code 1 if the new run is slower
outrider bench compare old1.json,old2.json,old3.json new1.json,new2.json,new3.json     tells smaller changes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.bench.peers.peer import VARIANTS
from outrider.bench.suites import builtin_names
from outrider.cli.parsers.shared import add_load_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", description=__doc__)
    add_load_options(parser)
    _add_what(parser)
    _add_how(parser)
    inner = parser.add_subparsers(dest="also", metavar="", title="subcommands")
    compared = inner.add_parser("compare", help="is the second run slower than the first?")
    compared.add_argument(
        "old", metavar="OLD[,OLD...]", help="written by --json; several runs, with commas, tell smaller changes"
    )
    compared.add_argument("new", metavar="NEW[,NEW...]", help="as many runs, each made right after its partner if possible")
    compared.add_argument("--threshold", type=float, default=0.02, help="changes smaller than this share are not reported")


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument("--methods", default="all", help="names of `outrider methods`, with commas (default: all)")
    group.add_argument("--suites", default="all", help=f"{', '.join(builtin_names())}, or .jsonl files (default: all of ours)")
    group.add_argument("--num-draft-tokens", "-K", default="", metavar="K,K", help="draft lengths (default: each method's own)")
    group.add_argument("--acceptance", default="", metavar="RULE,RULE", help="acceptance rules (default: each method's own)")
    group.add_argument(
        "--policy", default="", metavar="NAME,NAME", help="policies (default: as `generate`: adaptive, or fixed with -K)"
    )
    group.add_argument("--option", "-O", action="append", default=[], metavar="METHOD.NAME=VALUE", help="an option of a method")
    group.add_argument("--temperature", "-t", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    group.add_argument("--batch-sizes", default="1", metavar="B,B", help="batch size (default: 1)")
    group.add_argument("--max-tokens", "-n", type=int, default=64, help="tokens of a text")
    group.add_argument("--turns", type=int, default=1, help="turns per conversation (default: 1)")
    group.add_argument("--stop-at-eos", action="store_true", help="end at the end-of-sequence token (default: continue)")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("size and output")
    group.add_argument("--rounds", type=int, default=5, help="repetitions of every measurement")
    group.add_argument("--prompts", type=int, help="most prompts of a suite (default: all)")
    group.add_argument("--seconds", type=float, help="end in about this time, with fewer prompts, rounds and settings")
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ENGINE[=PYTHON]",
        help=f"another engine in its own environment: {', '.join(VARIANTS)} or 'all'; see docs/bench.md",
    )
    group.add_argument(
        "--peer-prompts", type=int, default=8, help="prompts of the comparison with peers (default: %(default)s)"
    )
    group.add_argument("--no-curves", action="store_true", help="leave out the cost of passes by size")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure with its provenance")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
