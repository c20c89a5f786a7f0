"""Write ``docs/reference.md``, the page of all methods, rules, policies and commands, from the tables themselves.

``python scripts/reference.py --check`` fails when the page is not what the tables say.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.cli.main import COMMANDS
from outrider.methods import METHODS, POLICIES, RULES

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
_INTRODUCTION = """# Methods, rules, policies, commands

This page is written by `python scripts/reference.py` from the tables of the program. `outrider methods NAME`
explains one entry with its options.
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |" for line in lines) + "\n"


def source(paper: str) -> str:
    """Where an idea comes from; a page of ours becomes a link."""
    if paper.startswith("docs/") and paper.endswith(".md"):
        name = paper.removeprefix("docs/")
        return f"[{name.removesuffix('.md')}]({name})"
    return paper


def page() -> str:
    """The whole page."""
    methods = table(
        ["Method", "Idea", "Draft model", "Source"],
        [
            (f"[{name}](methods/{name}.md)", row.summary, "needed" if row.needs_draft else "no", source(row.paper))
            for name, row in METHODS.items()
        ],
    )
    rules = table(
        ["Rule", "Idea", "Lossless", "Source"],
        [(f"`{name}`", row.summary, "yes" if row.rule.lossless else "no", source(row.paper)) for name, row in RULES.items()],
    )
    policies = table(["Policy", "Idea"], [(f"`{name}`", row.summary) for name, row in POLICIES.items()])
    commands = table(["Command", "What it does"], [(f"`outrider {name}`", line) for name, line in COMMANDS.items()])
    parts = [
        _INTRODUCTION,
        f"## Methods\n\n{methods}",
        f"## Acceptance rules\n\nThe default rule is `coupled`. See [Lossless](lossless.md) and [Lossy](lossy.md).\n\n{rules}",
        f"## Policies\n\nThe default policy is `adaptive`. See [Policies](policies.md).\n\n{policies}",
        f"## Commands\n\n`outrider COMMAND --help` shows the options of a command with their defaults.\n\n{commands}",
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/reference.md is out of date; run `python scripts/reference.py`")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
