"""docs/methods/README.md: the table of the field has every row, rule and policy, and its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from outrider.methods import METHODS, POLICIES, RULES

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_method_is_linked_and_every_link_is_a_method() -> None:
    """Plain decoding is what the others are compared with, and has no line."""
    linked = set(re.findall(r"\]\(([a-z0-9-]+)\.md\)", TEXT))
    assert linked | set(re.findall(r"`([a-z0-9-]+)`", TEXT)) >= set(METHODS) - {"plain"}
    assert linked <= set(METHODS), linked - set(METHODS)


def test_every_rule_and_policy_is_named() -> None:
    named = set(re.findall(r"`([a-z0-9+-]+)`", TEXT))
    assert named >= set(RULES), set(RULES) - named
    assert named >= set(POLICIES), set(POLICIES) - named


def test_every_line_has_six_columns_and_every_link_a_page() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).is_file(), target


def cells(column: int) -> Iterator[tuple[str, str]]:
    """Names of the methods with one cell of their line."""
    for line in TEXT.splitlines():
        if line.startswith("| ") and not line.startswith("| method "):
            parts = [cell.strip() for cell in line.split("|")[1:-1]]
            yield parts[0], parts[column]


def test_no_figure_of_ours_is_typed() -> None:
    """Decimals, factors and shares of the fourth column are filled in from results (``scripts/tables.py --check``)."""
    filled = re.compile(r"<!-- figure .*?<!-- end -->")
    typed = [(name, cell) for name, cell in cells(3) if re.search(r"\d\.\d|\dx\b|\d ?%", filled.sub("", cell))]
    assert not typed


def test_every_published_figure_says_where_it_is_from() -> None:
    """A letter of the page's list ends the cell."""
    letters = re.findall(r"^- ([A-Z]): ", TEXT, re.MULTILINE)
    assert len(letters) > 3
    named = re.compile(rf"\([{''.join(letters)}]\)$")
    published = [(name, cell) for name, cell in cells(4) if re.search(r"\d\.\d|\dx\b|\d ?%", cell)]
    assert len(published) > 40 and not [pair for pair in published if not named.search(pair[1])]


def test_every_line_says_something_of_ours() -> None:
    """A method that is not built has its nearest relative, or a word why there is none."""
    assert not [name for name, cell in cells(2) if not cell]
    assert not [name for name, cell in cells(3) if not cell]
