"""The page of the command line, ``docs/commands.md``: every option of every command. ``reference.py`` writes it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

from reference_api import prose

from outrider.cli.main import COMMANDS
from outrider.cli.parser import Help, Parser

_INTRODUCTION = """# Commands

This page is written by `python scripts/reference.py` from the parsers of the program. `outrider COMMAND --help` shows
the same in a terminal.
"""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command."""
    parser = Parser(prog="outrider")
    commands = parser.add_subparsers(dest="command")
    import_module(f"outrider.cli.parsers.{command}").add_parser(commands)
    return commands.choices[command]


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def _name(action: argparse.Action) -> str:
    words = ", ".join(f"`{option}`" for option in action.option_strings)
    value = action.metavar or (("|".join(map(str, action.choices))) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    if not words:
        return f"`{value}`".replace("|", "\\|")
    return words if action.nargs == 0 else f"{words} `{value}`".replace("|", "\\|")


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = Help("")._get_help_string(action) or ""
    return _escaped(text % {**vars(action), "prog": parser.prog}) if text else ""


def _parts(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    own = [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction | argparse._HelpAction)]
    shown = [one for one in own if one.help != argparse.SUPPRESS]
    if parser.description:
        yield prose(parser.description) + "\n"
    if shown:
        rows = (f"| {_name(one)} | {_meaning(parser, one)} |" for one in shown)
        yield "| option | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{'#' * depth} `{inner.prog}`\n"
                line = next((one.help for one in action._choices_actions if one.dest == name), None)
                if line:
                    yield f"{line[0].upper()}{line[1:]}.\n"
                yield from _parts(inner, depth + 1)


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for name, line in COMMANDS.items():
        parts += [f"## `outrider {name}`\n", f"{line[0].upper()}{line[1:].rstrip('?')}.\n" if "?" not in line else f"{line}\n"]
        parts += _parts(parser_of(name), 3)
    return "\n".join(parts)
