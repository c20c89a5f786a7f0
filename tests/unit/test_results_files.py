"""Results files of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.bench.provenance import keep_results


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "found.json"
    kept = keep_results(path, "what was measured", [{"a": 1}], script="benchmarks/some.py", note="more")
    assert json.loads(path.read_text()) == kept
    assert kept["rows"] == [{"a": 1}] and kept["note"] == "more" and kept["what"] == "what was measured"
