"""docs/methods/README.md: the table of the field names rows and rules that exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.methods import METHODS, RULES

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_linked_methods_are_rows_of_ours() -> None:
    """A page of this folder that the table links to is that of a method, and most methods are linked."""
    linked = set(re.findall(r"\]\(([a-z0-9-]+)\.md\)", TEXT))
    assert linked <= set(METHODS), linked - set(METHODS)
    assert len(linked) > 0.8 * 37


def test_rules_are_named() -> None:
    for name in ("block", "recursive", "traversal", "kseq", "transport", "typical", "lenient", "divergence"):
        assert name in RULES and f"`{name}`" in TEXT


def test_every_line_has_six_columns_and_every_link_a_page() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).is_file(), target
