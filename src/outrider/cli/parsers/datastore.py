"""``outrider datastore``: build the corpus that method ``rest`` copies from, and say what is in one.

    outrider datastore build FILES --model NAME --out DIR
    outrider datastore info DIR

A ``.jsonl`` file holds a document per line, a JSON string or an object with a "text" field; any other file is one document.
Files ending in ``.gz`` or ``.xz`` are unpacked on the way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.drafters.copying.shard_size import SHARD_TOKENS


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("datastore", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="tokenize text files and index them")
    build.add_argument("files", nargs="+", type=Path, metavar="FILES", help="text or .jsonl files, plain, .gz or .xz")
    build.add_argument("--model", metavar="NAME", help="whose tokenizer to use (default: the bundled model's)")
    build.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; must not hold a datastore")
    build.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="tokens indexed at once")
    info = actions.add_parser("info", help="describe a datastore, and verify its checksums")
    info.add_argument("folder", type=Path, metavar="DIR", help="written by `outrider datastore build`")
    info.add_argument("--json", action="store_true", help="print JSON")
