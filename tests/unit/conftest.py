"""What many files of this folder use."""

from __future__ import annotations

import ctypes

import prepared  # noqa: F401 (before anything of the package is imported)
import pytest

from outrider.models.native import BUILD


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The native pass; a test that wants it is skipped where it cannot be built."""
    found = BUILD.wait()
    if found is None:
        pytest.skip("no C++ compiler")
    return found
