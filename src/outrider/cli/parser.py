"""How command lines are read: help that shows every default, and mistakes answered with the nearest valid option.

``argparse`` prints its usage and ends the process on a mistake. ``Parser`` raises an ``OptionError`` instead, so that every
mistake on the command line is one line on standard error and exit code 2, whoever found it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, final

from outrider.core.errors import OptionError, closest


def shown_number(value: float) -> str:
    """A number as people write it: 4,000,000 and not 4e+06."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:g}"


@final
class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, prints code as ``code``, and adds the default to an option's help."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(text.replace("``", "`"), width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        untold = default is None or isinstance(default, bool | list) or default in ("", argparse.SUPPRESS)
        if untold or "default" in text or not action.option_strings:
            return action.help
        shown = shown_number(default) if isinstance(default, float) else "%(default)s"
        return f"{text} (default: {shown})".strip()


@final
class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises an ``OptionError`` for every mistake."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "formatter_class": Help})

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see `{self.prog} --help`")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. An unknown one is refused, and the nearest option suggested."""
        first = arguments[0].partition("=")[0] if arguments else ""
        if first.startswith("-") and not any(option.startswith(first) for option in self.options()):
            self._refuse(first)  # argparse would miss a command first
        chosen, unknown = self.parse_known_args(list(arguments))
        if unknown:
            self._refuse(next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0])
        return chosen

    def _refuse(self, name: str) -> NoReturn:
        is_option = name.startswith("-")
        hint = closest(name, self.options()) if is_option else ""
        raise OptionError(f"unknown {'option' if is_option else 'argument'} {name!r}; {hint}see --help")

    def options(self) -> list[str]:
        """Every option of this parser and of its subcommands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser.options()]
        return found
