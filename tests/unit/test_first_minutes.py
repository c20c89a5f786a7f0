"""What a new user types first: help, version, one method explained, and mistakes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import outrider
from outrider import OptionError
from outrider.cli.main import COMMANDS, console, main
from outrider.cli.progress import _Silence, first_explained, waiting
from outrider.methods import METHODS, POLICIES, RULES

PARSERS = Path(outrider.__file__).parent / "cli" / "parsers"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh process has loaded after a statement."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint(chr(10) + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "tqdm", "fastapi", "uvicorn"}


EACH_APART = """
import contextlib, io, json, os, sys
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        from outrider.cli.main import main
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(SystemExit):
                main(words)
        print(json.dumps([words, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_help_version_and_mistakes_load_nothing_heavy() -> None:
    """Every command in a fork of one fresh process."""
    asked = [["--help"], ["--version"], [], ["generate", "--temprature", "1"], *([name, "--help"] for name in COMMANDS)]
    command = [sys.executable, "-c", EACH_APART, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(map(json.loads, done.stdout.splitlines()))
    assert [words for words, _ in found] == asked
    for words, loaded in found:
        assert not HEAVY & set(loaded), words
        assert len([name for name in loaded if name.startswith("outrider.")]) <= 16, words


def test_the_help_names_what_can_be_trained() -> None:
    from outrider.cli.parsers.train import TRAINABLE
    from outrider.cli.train import TASKS
    from outrider.models.heads import HEAD_KINDS
    from outrider.train.kinds import OTHER_KINDS

    assert list(TRAINABLE) == [*HEAD_KINDS, *OTHER_KINDS, *TASKS]


def test_importing_outrider_loads_torch_on_first_use() -> None:
    assert "torch" not in modules_after("import outrider")
    assert "torch" in modules_after("from outrider import LLM")
    with pytest.raises(AttributeError, match="LLMM"):
        _ = outrider.LLMM  # type: ignore[attr-defined]


def test_the_help_lists_every_command(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    written = {path.stem for path in PARSERS.glob("*.py") if "def add_parser(" in path.read_text()}
    assert written == set(COMMANDS)
    for name, line in COMMANDS.items():
        assert name in out and line in out


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"outrider {outrider.__version__}\n"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_option_is_explained_and_shows_its_default(capsys, command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    if command == "generate":
        for text in (
            "most tokens to generate (default: 128)",
            "0 is greedy (default: 0)",
            "(default: 8; on a GPU, what fits)",
            "(default: auto)",
        ):
            assert text in words


def test_every_option_has_a_help_line() -> None:
    from outrider.cli.parser import Parser

    for name in COMMANDS:
        parser = Parser(prog="outrider")
        commands = parser.add_subparsers()
        import_module(f"outrider.cli.parsers.{name}").add_parser(commands)
        for action in commands.choices[name]._actions:
            is_inner = not action.option_strings and action.choices is not None  # subcommands have lines of their own
            assert action.help or is_inner or name == "serve", f"{name} {action.dest} is not explained"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["generat", "hi"], ("unknown command 'generat'", "did you mean 'generate'")),
        (["generate", "hi", "--temprature", "1"], ("unknown option '--temprature'", "did you mean '--temperature'")),
        (["generate", "hi", "-n", "many"], ("--max-tokens", "'many'", "outrider generate --help")),
        (["bench", "--secnds=60"], ("did you mean '--seconds'",)),
        (["methods", "prompt-lokup"], ("unknown method, rule or policy", "did you mean 'prompt-lookup'")),
        (["datastore"], ("ACTION",)),
        (["--verson"], ("unknown option '--verson'", "did you mean '--version'")),
        (["bench", "--seconds", "-1"], ("--seconds -1", "positive")),
        (["serve", "--port", "99999"], ("port = 99999", "at most 65535")),
    ],
)
def test_wrong_words_are_one_line_with_the_nearest_right_one(capsys, words: list[str], expected: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("outrider: ")
    for text in expected:
        assert text in err


def test_nothing_near_is_no_hint(capsys) -> None:
    assert "did you mean" not in run(capsys, "analyse", "--model", "x")[2]
    assert "did you mean" not in run(capsys, "methods", "nope")[2]


@pytest.mark.parametrize("name", [*METHODS, *RULES, *POLICIES])
def test_every_row_can_be_explained(capsys, name: str) -> None:
    code, out, _ = run(capsys, "methods", name)
    assert code == 0 and out.startswith(f"{name}: ") and "example" in out
    document = json.loads(run(capsys, "methods", name, "--json")[1])
    for options in document["options"].values():
        for option in options:
            assert option["meaning"], f"{name}: the option {option['name']} has no docstring"


def test_one_method_in_full(capsys) -> None:
    out = run(capsys, "methods", "prompt-lookup")[1]
    for text in ("max_ngram = 4", "Longest match looked for", "Saxena 2023", "--method prompt-lookup", "num_draft_tokens = 8"):
        assert text in out


def test_the_table_says_what_every_row_keeps(capsys) -> None:
    """Every row keeps the seed, but those whose idea is the test against q: README promises the same text for all others."""
    tested = ("sjd", "sjd-coupled")
    document = json.loads(run(capsys, "methods", "--json")[1])
    for name, row in document["methods"].items():
        assert row["keeps"].startswith("the law" if name in tested else "the seed"), name
    assert document["acceptance rules"]["kseq"]["keeps"].startswith("the law")
    assert document["acceptance rules"]["typical"]["keeps"].startswith("neither")


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [io.StringIO, Screen])
def test_a_wait_is_explained(monkeypatch: pytest.MonkeyPatch, screen: type[io.StringIO]) -> None:
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    out = screen()
    with waiting("loading a model", patience=0.0, out=out):
        while "loading a model ..." not in out.getvalue():
            time.sleep(0.001)
    assert re.search(r"loading a model: \d+ s\n$", out.getvalue())
    assert ("\r" in out.getvalue()) == (screen is Screen)


def test_no_wait_needs_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    with waiting("loading a model", patience=1000.0, out=out):
        pass
    with pytest.raises(OptionError), waiting("loading a model", patience=1000.0, out=out):
        raise OptionError("a mistake ends the wait")
    monkeypatch.setenv("OUTRIDER_QUIET", "1")
    with waiting("loading a model", patience=0.0, out=out):
        time.sleep(0.01)
    assert out.getvalue() == ""


def test_waits_that_follow_one_another_are_one_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is short enough to say nothing; together they are not."""
    out = io.StringIO()
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    monkeypatch.setattr("outrider.cli.progress._NEXT", 1000.0)
    with waiting("first", patience=1000.0, out=out):
        time.sleep(0.05)
    with waiting("second", patience=0.05, out=out):
        while "second ..." not in out.getvalue():
            time.sleep(0.001)
    assert "first" not in out.getvalue()
    monkeypatch.setattr("outrider.cli.progress._NEXT", 0.0)
    silence = _Silence(since=0.0, until=5.0)
    assert silence.before(9.0) == 0.0
    monkeypatch.setattr("outrider.cli.progress._NEXT", 5.0)
    assert silence.before(9.0) == 9.0


def test_the_end_of_a_wait_leaves_nothing_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Screen()
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    with waiting("loading a model", patience=0.0, out=out):
        while " ... " not in out.getvalue():
            time.sleep(0.001)
    assert re.search(r"\r\x1b\[Kloading a model: \d+ s\n$", out.getvalue())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {broken!r}", name=broken)

    real, broken = import_module, "tqdm"
    monkeypatch.setattr(
        "outrider.cli.main.import_module", lambda name: missing(name) if name == "outrider.cli.info" else real(name)
    )
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "outrider: the package 'tqdm' is not installed here; run `pip install outrider` again\n"
    broken = "outrider.models.gone"
    with pytest.raises(ModuleNotFoundError):  # a defect of ours is no mistake of the user's
        main(["info"])


def test_the_process_ends_without_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr("outrider.cli.main.gc.freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", ["outrider"])
    assert console() == 0 and frozen == [True] and "usage: outrider" in capsys.readouterr().out


def test_the_wait_for_the_first_piece_is_explained(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    monkeypatch.setattr("outrider.cli.progress.PATIENCE", 0.0)
    seen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", seen)

    def pieces() -> Iterator[int]:
        while "reading the prompt ..." not in seen.getvalue():
            time.sleep(0.001)
        yield from (1, 2)

    assert list(first_explained(pieces(), "reading the prompt")) == [1, 2]
    assert list(first_explained([], "reading the prompt")) == []


def test_loading_is_a_wait(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    monkeypatch.setattr("outrider.cli.progress.PATIENCE", 0.0)
    assert main(["generate", "Once upon a time", "-n", "2"]) == 0
    assert "loading the bundled model ...\nloading the bundled model: " in capsys.readouterr().err


def test_the_first_lines_of_the_readme_and_the_licence() -> None:
    root = Path(__file__).parents[2]
    first = (root / "README.md").read_text().splitlines()[:40]
    for words in ("pip install", "Your own model in three lines", "CPU only", "GPU", "Mac"):
        assert any(words in line for line in first), words
    assert (
        "Apache License" in (root / "LICENSE").read_text() and 'license = "Apache-2.0"' in (root / "pyproject.toml").read_text()
    )
