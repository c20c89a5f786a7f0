"""docs/methods/README.md: the table of the field has every row, rule and policy, and its links lead somewhere."""

from __future__ import annotations

import re
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
