"""Settings of a training run on the command line: ``--option NAME=VALUE`` read, checked and filled into a settings class."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from outrider.cli.options import value_of
from outrider.core.errors import OptionError, nearest


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Settings by name, from NAME=VALUE pairs. Taps are a list of layer numbers."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--option {pair!r} is not valid; write NAME=VALUE")
        found[name.replace("-", "_")] = value_of(value)
    if "taps" in found:
        found["taps"] = [int(tap) for tap in str(found["taps"]).split(",")]
    return found


def filled(kind: Any, given: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """A settings class filled with the given values over ``defaults``. Names of other classes are ignored."""
    names = {item.name for item in fields(kind)}
    return kind(**{name: value for name, value in {**defaults, **given}.items() if name in names})


def check_names(given: Collection[str], valid: Collection[str], *, what: str) -> None:
    """Refuse a setting that ``what`` does not have."""
    bad = next((name for name in given if name not in valid), None)
    if bad is not None:
        raise OptionError(f"training {what} has no setting {bad!r}; {nearest(bad, valid)}")
