"""The version of the package, as ``outrider --version`` prints it and ``pyproject.toml`` repeats it."""

from __future__ import annotations

VERSION = "0.1.0"
