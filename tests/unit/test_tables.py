"""Tables of measured figures: pages hold what the results files say, and a results file says where it comes from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _load()


def test_no_page_is_stale() -> None:
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"{page.name}: run python scripts/tables.py"


def test_a_block_is_written_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"command": "make it", "machine": "a machine", "date": "2026-01-01", "commit": "abc", "what": "speeds"}
    rows = [{"method": "plain", "speed": {"a": 1234.5, "b": [0.12345, 2]}}, {"method": "x|y", "more": 3}]
    (tmp_path / "mine.json").write_text(json.dumps({**document, "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.filled("before\n<!-- results mine -->\nold\n<!-- end -->\nafter")
    assert "old" not in text and text.startswith("before\n<!-- results mine -->\n") and text.endswith("<!-- end -->\nafter")
    assert "| method | speed: a | speed: b | more |" in text
    assert "| plain | 1234 | 0.1235, 2 |  |" in text and "| x y |  |  | 3 |" in text
    assert "Speeds. <code>make it</code>; a machine; 2026-01-01; commit: abc" in text
    assert tables.filled(text) == text
    text = tables.filled("It is <!-- figure mine: {speed[a]:.1f} times ({method}) -->2 times<!-- end --> as fast.")
    assert text == "It is <!-- figure mine: {speed[a]:.1f} times ({method}) -->1234.5 times (plain)<!-- end --> as fast."
    assert ">3<" in tables.filled("<!-- figure mine[method=x|y]: {more} --><!-- end -->")
    with pytest.raises(SystemExit, match="the row 'method=none' of mine"):
        tables.filled("<!-- figure mine[method=none]: {more} --><!-- end -->")
    with pytest.raises(SystemExit, match=r"'other', and there is no other\.json; there are mine"):
        tables.filled("<!-- results other -->\n<!-- end -->")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    for key in ("command", "machine", "date", "commit", "what", "rows"):
        assert document.get(key), f"{path.name} lacks {key!r}"
