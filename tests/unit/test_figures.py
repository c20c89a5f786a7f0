"""Every figure of the pages says where it comes from, and the check would find one that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import figures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_every_figure_has_a_source(page: Path) -> None:
    found = list(figures.untraced(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "line",
    [
        "It is 1.71x as fast.",
        "A pass takes 12 ms here.",
        "It emits 1,200 tokens/s.",
        "| draft-model | 1.40x |",
        "| acceptance | 0.71 |",
        "It is right in 40 % of places, see `no_such_file.json`.",
        "It is 9.87x as fast (`benchmarks/results/demo.json`).",
        "| draft-model | 9.87 |\n\nThe figures are in `benchmarks/results/demo.json`.",
        "`python benchmarks/demo.py` says 1.71x.",
        "| method | here | published |\n|---|---|---|\n| eagle | 9.87x | 3.1x |",
        "It takes 987 ms, see [figures](performance.md).",
        "A row of another page counts there alone: 70.6 tokens/s (`recorded.json`).",
    ],
)
def test_a_figure_without_a_source_is_found(line: str) -> None:
    page = f"# Title\n\nWords.\n\n## Another section\n\n[a link](there.md)\n\n## Speed\n\n{line}\n"
    found = list(figures.untraced("docs/page.md", page))
    assert len(found) == 1 and found[0].line in (11, 13) and "is in no results file" in found[0].message


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.71x as fast.\n<!-- results demo -->\n| 2.0x |\n<!-- end -->",
        "It is <!-- figure demo: {median} -->1.7x<!-- end --> as fast.",
        "It is 1.71x as fast (`benchmarks/results/demo.json`).",
        "| draft-model | 1.71 |\n\nThe figures are in `benchmarks/results/demo.json`.",
        "| method | here | published |\n|---|---|---|\n| eagle | 1.71x (`demo.json`) | 3.1x |",
        "The paper reports 3.1x.",
        "Intervals are 95 % intervals of medians: the interval covers 95 % of them.",
        "```\nspeed 1.71x\n```",
        "An array of 4 x 8 tiles, and 3 rows.",
        "| option | default |\n|---|---|\n| `tau` | 0.9 |",
        "| acceptance | 0.71 (arXiv 2211.17192) |",
        "| rule | `lenient=0.5` |",
    ],
)
def test_a_figure_with_a_source_is_not(text: str) -> None:
    assert not list(figures.untraced("docs/page.md", f"# Title\n\n{text}\n"))


def test_figures_are_compared_as_they_were_rounded() -> None:
    found = frozenset({1.7149, 0.0123, 0.942})
    assert figures.stands("1.71", "x", found) and not figures.stands("1.72", "x", found)
    assert figures.stands("12", "ms", found) and figures.stands("1.2", "%", found) and figures.stands("94", "%", found)
    assert figures.stands("6", "%", found), "0.942 of the speed is 6 % slower"
    assert not figures.stands("12", "tokens/s", found)


def test_a_linked_page_lends_its_files() -> None:
    page = next(iter(figures.linked("docs/page.md", "[speed](performance.md)"))).page
    assert page == "docs/performance.md" and not figures.linked("docs/page.md", "[none](there.md)")
