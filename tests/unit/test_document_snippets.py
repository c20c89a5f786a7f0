"""Programs and commands of the pages: they run as they are printed, with the bundled models for a model's name.

A program that cannot run here says why in a comment above it: ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROGRAM = re.compile(r"^(?:<!-- not run: ([^>]+) -->\n\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STANDS_FOR = {"folder-or-hub-name-or-gguf": "target", "model": "target", "MODEL": "target", "draft": "draft", "SMALL": "draft"}
"""Names of models in the pages, and the bundled ones that stand for them."""


def programs() -> list[tuple[str, str]]:
    """Page and text of every program that is to run."""
    found = [(path, PROGRAM.findall(path.read_text(encoding="utf-8"))) for path in PAGES]
    return [(path.relative_to(ROOT).as_posix(), text) for path, each in found for why_not, text in each if not why_not]


def made_runnable(program: str) -> str:
    """The bundled models for names of models, and short texts."""
    for name, bundled in STANDS_FOR.items():
        program = program.replace(f'"{name}"', repr(bundled_path(bundled)))
    return re.sub(r"max_tokens=\d+", "max_tokens=8", program)


def given(page: str) -> dict[str, Any]:
    """Names that a page speaks of before its program uses them."""
    method = Path(page).stem
    names: dict[str, Any] = {"LLM": LLM, "model": bundled_path("target"), "contract": "Payment is due.", "appendix": "Terms."}
    return {**names, "llm": LLM(method=method)} if method in ("suffix", "ngram-cache") else names


@pytest.mark.parametrize(("page", "program"), programs(), ids=[page for page, _ in programs()])
def test_programs_run(page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "GrammarCompiler" in program:
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)  # a program may save a file
    exec(compile(made_runnable(program), page, "exec"), given(page))


def test_every_program_is_counted() -> None:
    """A comment in another form would hide none: the block below it runs."""
    whole = sum(path.read_text(encoding="utf-8").count("```python\n") for path in PAGES)
    assert whole == sum(len(PROGRAM.findall(path.read_text(encoding="utf-8"))) for path in PAGES)
    assert len(programs()) >= 9


def commands() -> list[str]:
    """The commands of the first page: fenced blocks without a language."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks for line in block.splitlines() if not language]
    return [line for line in lines if line.startswith("outrider ")]


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
