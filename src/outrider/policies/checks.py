"""Checks of policy options. An error says what is wrong, why, and what to write instead."""

from __future__ import annotations

from outrider.core.errors import OptionError


def check_count(name: str, value: object, *, at_least: int = 1, hint: str = "") -> None:
    """Check a whole number against its lower bound."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least {at_least}{hint}")


def check_between(name: str, value: object, low: float, high: float) -> None:
    """Check that a number lies in a closed interval."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise OptionError(f"{name} = {value!r} is not valid; use a number from {low:g} to {high:g}")


def check_order(low_name: str, low: int, high_name: str, high: int) -> None:
    """Check that the first option is not larger than the second."""
    if low > high:
        raise OptionError(f"{low_name} = {low} and {high_name} = {high} are not valid together; use {low_name} <= {high_name}")


def check_nodes(value: object) -> None:
    """Check ``num_tree_nodes``: a count, or None."""
    if value is not None:
        check_count("num_tree_nodes", value)
