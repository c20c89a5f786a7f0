"""Programs and commands of the first pages: they run as they are printed, with the bundled model for a model's name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from outrider.bundled import bundled_path
from outrider.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = ["index.md", "pipeline.md"]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language. Commands have none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for written_in, body in found if written_in == language]


def commands() -> list[str]:
    lines = [line for block in blocks("index.md", "") for line in block.splitlines()]
    return [line for line in lines if line.startswith("outrider ")]


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run_and_print_something(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    programs = blocks(page, "python")
    assert programs
    for program in programs:
        exec(compile(program.replace("folder-or-hub-name-or-gguf", bundled_path("target")), page, "exec"), {})
        assert capsys.readouterr().out.strip()


def test_commands_have_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(commands()) >= 3
    for command in commands():
        words = shlex.split(command)
        with pytest.raises(SystemExit) as ended:
            main([words[1], "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        for option in filter(lambda word: word.startswith("--"), words):
            assert option in shown, f"{command!r} uses {option}, which `outrider {words[1]} --help` does not show"
