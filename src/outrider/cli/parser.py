"""How command lines are read: help that shows every default, and mistakes answered with the nearest valid option.

``argparse`` prints its usage and ends the process on a mistake. ``Parser`` raises an ``OptionError`` instead, so that every
mistake on the command line is one line on standard error and exit code 2, whoever found it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, final

from outrider.core.errors import OptionError, closest, nearest

_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def _called(action: argparse.Action) -> str:
    """An option's longest name, or the name of a positional argument in the usage."""
    return max(action.option_strings, key=len) if action.option_strings else str(action.metavar or action.dest)


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of an option's choices, with the nearest one."""
        if action.choices is not None and value not in action.choices:
            raise OptionError(f"{_called(action)} {value!r} is not valid; {nearest(str(value), map(str, action.choices))}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An option's value of its type. A text that is no number is refused in words."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _NUMBERS:
                raise
            raise OptionError(
                f"{_called(action)} {arg_string!r} is not valid; write {_NUMBERS[action.type]}, see `{self.prog} --help`"
            ) from None

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
        what = f"unknown {'option' if is_option else 'argument'} {name!r}"
        raise OptionError(f"{what}; {closest(name, self.options() if is_option else ())}see --help")

    def options(self) -> list[str]:
        """Every option of this parser and of its subcommands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser.options()]
        return found
