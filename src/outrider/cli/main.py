"""``outrider``: the list of subcommands, and what happens to errors.

Exit codes: 0 done, 2 something in the input is wrong (one line says what and how to mend it), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from outrider.cli import (
    audit,
    bench,
    chat,
    datastore,
    export,
    generate,
    info,
    inspect,
    methods,
    serve,
    simulate,
    train,
    tune,
    viz,
)
from outrider.core.errors import OutriderError

_COMMANDS = (generate, methods, info, inspect, export, datastore, bench, audit, simulate, tune, train, serve, chat, viz)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Language models generate faster without changing what they say."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
