"""The page of all methods, rules, policies and commands: it names every row, and links where there is a page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from outrider.methods import METHODS, POLICIES, RULES

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_page", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _load()


def test_every_row_of_the_tables_is_on_the_page() -> None:
    text = reference.page()
    assert all(f"[{name}](methods/{name}.md)" in text and row.summary in text for name, row in METHODS.items())
    assert all(f"| `{name}` | {row.summary} |" in text for name, row in [*RULES.items(), *POLICIES.items()])


def test_lossy_rules_say_so() -> None:
    lines = reference.page().splitlines()
    for name, row in RULES.items():
        (line,) = [line for line in lines if line.startswith(f"| `{name}` | {row.summary} |") and line.count("|") == 5]
        assert ("| yes |" in line) == row.rule.lossless


def test_a_page_of_ours_becomes_a_link_and_a_paper_stays() -> None:
    assert reference.source("docs/lossy.md") == "[lossy](lossy.md)"
    assert reference.source("arXiv 2211.17192") == "arXiv 2211.17192"


def test_a_cell_cannot_end_its_column() -> None:
    assert reference.table(["a"], [("x | y",)]) == "| a |\n| --- |\n| x   y |\n"
