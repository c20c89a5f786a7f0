"""scripts/first_minutes.py: the commands of a new user's first ten minutes work, and the transcript tells what happened."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from outrider.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import first_minutes


def in_this_process(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> first_minutes.Step:
    """As ``first_minutes.take``, without loading PyTorch again for every command."""
    began = time.perf_counter()
    try:
        code = main(command)
    except SystemExit as ended:  # help and version end the process
        code = int(ended.code or 0)
    seen = capsys.readouterr()
    return first_minutes.Step(command, seen.out, seen.err, code, time.perf_counter() - began)


def test_every_command_of_the_first_minutes_works(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_QUIET", "0")
    steps: dict[str, first_minutes.Step] = {}
    for command, typed in first_minutes.commands(None):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        step = in_this_process(capsys, command)
        steps[step.text().splitlines()[0]] = step
        assert step.code == (2 if "--max-tokns" in command else 0), step.text()
        assert step.is_explained and "Traceback" not in step.text()
    texts = "\n".join(step.text() for step in steps.values())
    for words in ("tokens/pass", "did you mean '--max-tokens'", "max_ngram = 4", "same bits", "prompt-lookup", "[exit code 0"):
        assert words in texts


def test_a_silent_wait_is_marked() -> None:
    assert "nothing explained" in first_minutes.Step(("generate",), "", "", 0, 5.0).text()
    assert "nothing explained" not in first_minutes.Step(("generate",), "", "loading ...", 0, 5.0).text()


def test_a_real_process() -> None:
    step = first_minutes.take(["--version"], "")
    assert step.code == 0 and step.output.startswith("outrider ")
