"""``outrider methods``: the tables of methods, acceptance rules and policies; ``outrider methods NAME`` explains one."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("methods", description=__doc__)
    parser.add_argument("name", nargs="?", help="a method, rule or policy: its options, what they mean, paper and an example")
    parser.add_argument("--json", action="store_true", help="print JSON")
