"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from outrider import METHODS

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: importing everything again would take longer than most of them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # for the programs that it starts
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))  # a notebook may register a method
    exec(compile(code, str(path), "exec"), main.__dict__)


def test_a_notebook_holds_no_output() -> None:
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert all(not cell.get("outputs") for cell in cells), f"{path.name}: clear all outputs before you commit it"
        assert cells[0]["cell_type"] == "markdown"
