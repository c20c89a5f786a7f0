"""Write the generated pages of the reference: ``python scripts/reference.py``.

``docs/reference.md`` lists methods, rules, policies and commands, from the tables themselves. ``docs/api.md`` is made from the
docstrings of the public names, ``docs/commands.md`` from the parsers of the command line, ``docs/metrics.md`` from the server's
registry. ``--check`` fails when a page is not what these say.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import reference_api
import reference_commands
import reference_metrics

from outrider.cli.main import COMMANDS
from outrider.methods import METHODS, POLICIES, RULES

DOCS = Path(__file__).parents[1] / "docs"
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
        f"## Commands\n\n[Commands](commands.md) has every option.\n\n{commands}",
    ]
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "reference": page,
    "api": reference_api.page,
    "commands": reference_commands.page,
    "metrics": reference_metrics.page,
}


def stale() -> list[str]:
    """Names of the pages that are not what the program says."""
    files = {name: DOCS / f"{name}.md" for name in PAGES}
    return [name for name, file in files.items() if not file.is_file() or file.read_text(encoding="utf-8") != PAGES[name]()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    check, found = parser.parse_args().check, stale()
    for name in found:
        if check:
            print(f"docs/{name}.md is out of date; run `python scripts/reference.py`")
        else:
            (DOCS / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
