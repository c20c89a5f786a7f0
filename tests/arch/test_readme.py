"""The README is one screen: what it is, three commands, a picture of real speed-ups, and where to read on."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import tables  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
WIDTH, LINES, PICTURE = 120, 50, 14
"""A screen in columns and lines, and the lines that a picture takes on it."""


def rendered(text: str) -> list[str]:
    """The lines of a Markdown text as a reader sees them: without comments and addresses, with paragraphs wrapped."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = list[str]()
    for number, part in enumerate(re.split(r"^```.*\n", text, flags=re.MULTILINE)):
        blocks = [] if number % 2 else re.split(r"\n\s*\n", part.strip())
        lines += [*part.splitlines(), ""] if number % 2 else [line for block in blocks for line in (*_block(block), "")]
    return lines[:-1]


def _block(block: str) -> list[str]:
    """The lines of a paragraph, table or picture."""
    if block.startswith("!["):
        return [block] * PICTURE
    if block.startswith("|"):
        return [line for line in block.split("\n") if not re.fullmatch(r"[|\s:-]+", line)]
    return textwrap.wrap(" ".join(block.split()), WIDTH)


def test_the_readme_is_one_screen() -> None:
    before, _, after = README.partition("\n## Where next\n")
    assert after, "the README says where to read on"
    assert len(rendered(before)) <= LINES, f"the README takes {len(rendered(before))} lines before 'Where next'"
    assert all(len(line) <= WIDTH for line in rendered(before) if not line.startswith("!")), "tables fit the screen too"


def test_the_readme_has_three_commands_and_a_picture_from_a_results_file() -> None:
    commands = README.split("```")[1].strip().splitlines()
    assert [line.split()[0] for line in commands[1:]] == ["outrider"] * 3, "one line installs it, three show it"
    picture = re.search(r"!\[[^\]]+\]\((docs/images/\w+\.svg)\)", README)
    assert picture and (ROOT / picture[1]).is_file()
    assert f'"{Path(picture[1]).stem}"' in (ROOT / "scripts" / "plots.py").read_text(), (
        "scripts/plots.py draws it from a results file"
    )
    assert tables.FIGURE.search(README), "the speed-up of the demo comes from its results file"


def test_a_rendered_line_has_no_comments_and_no_addresses() -> None:
    text = "One <!-- figure demo: {x} -->1<!-- end --> [page](a.md).\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n![p](p.svg)\n"
    assert rendered(text) == ["One 1 page.", "", "| a | b |", "| 1 | 2 |", "", *["![p](p.svg)"] * PICTURE]
