"""Colours for a terminal that has them; plain text for everything else."""

from __future__ import annotations

import os
import sys

from outrider.core.request import Origin

_CODES = {Origin.ACCEPTED: "32", Origin.RECOVERED: "33", Origin.BONUS: "36"}
_MEANING = {Origin.ACCEPTED: "drafted and accepted", Origin.RECOVERED: "corrected by the target", Origin.BONUS: "bonus"}


def can_colour() -> bool:
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if can_colour() else text


def bold(text: str) -> str:
    return _paint(text, "1")


def dim(text: str) -> str:
    return _paint(text, "2")


def coloured(text: str, origin: Origin) -> str:
    """A token in the colour of its origin."""
    return _paint(text, _CODES[origin])


def legend() -> str:
    """The legend of the colours."""
    return "   ".join(coloured(f"■ {meaning}", origin) for origin, meaning in _MEANING.items())
