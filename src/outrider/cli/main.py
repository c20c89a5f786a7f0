"""``outrider``: the list of subcommands, and the handling of errors.

A command's options (``cli/parsers/``) are separate from its work (``cli/``), which is imported after the options were read. So
help texts and misspelt options do not wait for PyTorch.

Exit codes: 0 success; 2 wrong input, with one line that says what is wrong and what to do; 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from outrider.cli.parser import Parser
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError, OutriderError, RankError, nearest
from outrider.core.version import VERSION

COMMANDS = {
    "demo": "watch the bundled models write, plain and speculative",
    "generate": "continue a prompt",
    "chat": "talk to a model in the terminal",
    "route": "let a small model write some of the steps (lossy)",
    "imagine": "draw an image, and show how its tokens were accepted",
    "serve": "serve the OpenAI API, and a page to watch it",
    "methods": "list methods, acceptance rules and policies, or explain one",
    "info": "describe a model",
    "why": "explain why each round drafted what it did",
    "bench": "measure every method against plain decoding",
    "tune": "find the fastest method for your prompts on this machine",
    "audit": "is a method lossless on a model, here?",
    "simulate": "predict speculation on other hardware",
    "analyse": "estimate what hidden states know beyond the next token",
    "train": "train heads or a draft model for a target",
    "inspect": "say what a folder of heads is",
    "export": "write a folder of heads in another layout",
    "trim": "let a draft model or heads say the commonest tokens only",
    "prune": "make a draft model out of parts of a larger one",
    "datastore": "build or inspect a corpus to copy from",
    "viz": "replay a recorded trace in a page",
}
"""Every subcommand in the order of the help, with its one-line description."""

_DESCRIPTION = """Language models generate faster without changing what they say.

  outrider generate "Once upon a time" --show      the bundled models, every token coloured by where it came from
  outrider chat --model FOLDER                     your own model
  outrider COMMAND --help                          the options of a command, with their defaults"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = _parser(next((word for word in words if not word.startswith("-")), None))
        if not words:
            parser.print_help()
            return 0
        chosen = parser.read(words)
        return _command(chosen.command).run(chosen)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(name: str) -> ModuleType:
    """The function that runs a command. A missing package is named in the error."""
    try:
        with waiting("loading PyTorch"):
            return import_module(f"outrider.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "outrider":
            raise
        raise OptionError(f"the package {error.name!r} is not installed here; run `pip install outrider` again") from None


def console() -> int:
    """``main`` as a process. It skips the final garbage collection, which takes most of a second."""
    code = main()
    gc.freeze()
    return code


def _parser(command: str | None) -> Parser:
    """A parser with the names of all commands, and the options of the given one."""
    if command is not None and command not in COMMANDS:
        raise OptionError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    parser = Parser(prog="outrider", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"outrider {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        if name == command:
            import_module(f"outrider.cli.parsers.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=line)
    return parser
