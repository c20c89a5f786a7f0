"""The site's tree: every page is in it once, and a record of a decision stands under what it is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.methods import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
RECORDS = sorted((DOCS / "decisions").glob("0*.md"))


def under(lines: list[str], heading: re.Pattern[str], record: re.Pattern[str]) -> dict[str, str]:
    """The heading above every record."""
    found, last = dict[str, str](), ""
    for line in lines:
        last = match[1] if (match := heading.match(line)) else last
        if match := record.search(line):
            found[match[1]] = last
    return found


def test_every_page_is_in_the_tree_once() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    named = re.findall(r"([\w./-]+\.md)$", NAV, re.MULTILINE)
    assert sorted(named) == pages


def test_a_record_stands_under_its_area() -> None:
    """The area that a record names is its heading in the site's tree and in the index."""
    areas = dict[str, str]()
    for path in RECORDS:
        found = re.search(r"^Date: \d{4}-\d\d-\d\d\. Area: ([^.]+)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"{path.name} names no date and area"
        areas[path.name] = found[1]
    tree = NAV.partition("  - Decisions:\n")[2].splitlines()
    assert under(tree, re.compile(r"      - (\w+):$"), re.compile(r"decisions/(0.*\.md)$")) == areas
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8").splitlines()
    assert under(index, re.compile(r"## (\w+)$"), re.compile(r"\((0[^)]*\.md)\)")) == areas


@pytest.mark.parametrize("method", list(METHODS))
def test_a_methods_page_says_idea_source_cost_and_when(method: str) -> None:
    """Each stands in a paragraph of its own that begins with the word in bold."""
    text = (DOCS / "methods" / f"{method}.md").read_text(encoding="utf-8")
    labels = re.findall(r"^\*\*([A-Z][^*]*?)\.?\*\*", text, re.MULTILINE)
    for word in ("Idea", "Source", "Cost", "When"):
        assert any(label.startswith(word) for label in labels), f"docs/methods/{method}.md has no paragraph **{word}.**"
