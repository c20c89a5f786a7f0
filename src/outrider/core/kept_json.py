"""Small JSON files that cache measured facts: prices of a machine, verdicts on a model.

An unreadable file counts as missing. Where nothing can be written, nothing is kept, and the caller measures again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The contents of the file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def keep_json(path: Path, document: Any) -> None:
    """Write the file, under a temporary name first: another process may be doing the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(document, file)
        Path(file.name).replace(path)
    except OSError:
        return
