"""Programs and commands of the pages: they run as they are printed, with the bundled models for a model's name.

Commands are not run here: the names of programs and options are looked up. Programs and commands stand in fences, where these
tests find them.

A program that cannot run here says why in a comment above it: ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import COMMANDS
from outrider.cli.parser import Parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROGRAM = re.compile(r"^(?:<!-- not run: ([^>]+) -->\n\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STANDS_FOR = {
    **dict.fromkeys(("folder-or-hub-name-or-gguf", "model", "MODEL", "TARGET"), "target"),
    **dict.fromkeys(("draft", "SMALL", "FIRST", "SECOND"), "draft"),
    "build/images/mnist/target": "digits/target",
    "build/images/mnist/draft": "digits/draft",
}
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
    assert len(programs()) >= 12


def is_program(block: str) -> bool:
    """Whether a block is Python that imports or calls something."""
    try:
        found = ast.walk(ast.parse(block))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in found)


def test_a_program_is_marked_as_one() -> None:
    """A fence without a language would hide a program from the test that runs them."""
    assert is_program("from outrider import LLM\nllm = LLM()") and not is_program("y ~ p(. | s)")
    for path in PAGES:
        for _, language, block in FENCED.findall(path.read_text(encoding="utf-8")):
            assert language == "python" or not is_program(block), f"{path.name}: mark this block as python: {block[:60]!r}"


def test_commands_stand_in_fences() -> None:
    """Commands that are only indented would not be looked up."""
    for path in PAGES:
        text = FENCED.sub("", path.read_text(encoding="utf-8"))
        found = re.search(r"(?<=\n\n)    (?:outrider|pip|python|torchrun|make) .*", text)
        assert not found, f"{path.name}: put this command into a fence: {found[0] if found else ''}"


SCRIPT = re.compile(r"\bpython ((?:benchmarks|scripts|recipes|examples)/[\w/]+\.py)((?: +[^`\s|;&#<]+)*)")
INLINE = re.compile(r"(?<!`)`[^`]+`(?!`)")


def test_programs_of_the_repository_exist_with_their_options() -> None:
    """Records of decisions and lines under measurements are left out: they name the commands of their day."""
    parsers = "".join(path.read_text() for path in (ROOT / "src" / "outrider" / "cli" / "parsers").glob("*.py"))
    for path in PAGES:
        text = re.sub(r"^<small>.*</small>$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        text = INLINE.sub(lambda code: code[0].replace("\n", " "), text.replace("\\\n", " "))
        for name, rest in [] if path.parent.name == "decisions" else SCRIPT.findall(text):
            assert (ROOT / name).is_file(), f"{path.name}: there is no {name}"
            beside = "".join(file.read_text() for file in (ROOT / name).parent.glob("*.py")) + parsers
            for option in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", rest):
                assert f'"{option}"' in beside, f"{path.name}: {name} has no option {option}"


FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[;&(] *|\b(?:torchrun|python) [^|;]*-m +|^[A-Z_]+=\S+ )outrider +([a-z]+)([^#;&|]*)")


def commands() -> list[tuple[str, str, list[str]]]:
    """Page, subcommand and long options of every ``outrider`` command in a fenced block."""
    found = list[tuple[str, str, list[str]]]()
    for path in PAGES:
        for _, language, block in FENCED.findall(path.read_text(encoding="utf-8")):
            if language in ("", "bash", "sh", "console"):
                for line in block.replace("\\\n", " ").splitlines():
                    for name, rest in COMMAND.findall(line.strip().removeprefix("$ ")):
                        found.append((path.relative_to(ROOT).as_posix(), name, re.findall(r"(?:^|\s)(--[a-z][\w-]*)", rest)))
    return found


@cache
def options_of(command: str) -> set[str]:
    """Every option of a command and of what follows it."""
    parser = Parser(prog="outrider")
    subcommands = parser.add_subparsers(dest="command")
    import_module(f"outrider.cli.parsers.{command}").add_parser(subcommands)
    waiting, options = list[argparse.ArgumentParser](subcommands.choices.values()), set[str]()
    while waiting:
        for action in waiting.pop()._actions:
            options |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    return options


def test_commands_have_options_that_exist() -> None:
    """On every page, a command and each of its options is one of the program's."""
    assert len({page for page, _, _ in commands()}) >= 20 and len(commands()) >= 100
    for page, name, options in commands():
        assert name in COMMANDS, f"{page}: there is no command {name!r}"
        unknown = set(options) - options_of(name)
        assert not unknown, f"{page}: `outrider {name} --help` does not show {sorted(unknown)}"
