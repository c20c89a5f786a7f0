"""scripts/first_minutes.py: the commands of a new user's first ten minutes work, and the transcript tells what happened."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from outrider.bundled import bundled_path
from outrider.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import first_minutes
from first_minutes import Shown, Step

OWN = bundled_path("draft")
COMMANDS = [*first_minutes.commands(None), *(pair for pair in first_minutes.commands(OWN) if OWN in pair[0])]


def in_this_process(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> tuple[int, str]:
    """As ``first_minutes.take``, without loading PyTorch again for every command."""
    try:
        code = main(command)
    except SystemExit as ended:  # help and version end the process
        code = int(ended.code or 0)
    seen = capsys.readouterr()
    return code, seen.out + seen.err


def test_every_command_of_the_first_minutes_works(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    texts: list[str] = []
    for command, typed in COMMANDS:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code, text = in_this_process(capsys, command)
        assert code == (2 if "--max-tokns" in command else 0), text
        assert "Traceback" not in text
        texts.append(text)
    for words in ("tokens/pass", "did you mean '--max-tokens'", "max_ngram = 4", "same bits", "prompt-lookup"):
        assert any(words in text for text in texts), words


def test_a_silent_wait_is_marked() -> None:
    silent = Step("outrider generate", (Shown(0.1, "hello\n"),), 0, 9.0)
    assert silent.silences == [(pytest.approx(8.9), "hello")]
    assert "waits that nothing explained: 9 s after 'hello'" in silent.text()
    assert Step("outrider generate", (), 0, 9.0).silences == [(9.0, "")]


@pytest.mark.parametrize("line", ["loading a model ...", "\rloading a model ... 4 s", "Building wheel: started\n"])
def test_a_wait_that_the_line_before_explains_is_not(line: str) -> None:
    assert Step("outrider generate", (Shown(2.0, line), Shown(2.0, "\n"), Shown(30.0, "done\n")), 0, 31.0).silences == []


@pytest.mark.exhaustive  # `make test` itself runs in an environment that pip has set up
def test_the_package_is_installed_and_its_server_answers(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    installed = first_minutes.install(tmp_path)
    assert installed.code == 0, installed.text()
    version = first_minutes.outrider(tmp_path / "installed", ["--version"])
    assert version.code == 0 and version.output.startswith("outrider ")
    served = first_minutes.serve(tmp_path / "installed", OWN)
    assert served.code == 0 and "POST /v1/completions" in served.output, served.text()
    assert "Traceback" not in served.output


def test_what_is_said_and_typed_is_recorded_with_its_time() -> None:
    code = "import sys; print('one', flush=True); text = input(); print('two ...', end='', file=sys.stderr); print(text)"
    step = first_minutes.take("python -c ...", [sys.executable, "-c", code], "typed\n")
    assert {shown.text.strip() for shown in step.screen} == {"one", "two ...", "typed"}
    assert step.screen[0].seconds < step.screen[-1].seconds <= step.seconds and step.code == 0
