"""Every example runs, and is short enough to be read."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from outrider import METHODS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program without arguments, in this process: importing everything again would take longer than most of them."""
    assert len(path.read_text().splitlines()) <= 60
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))  # an example may register a method
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
