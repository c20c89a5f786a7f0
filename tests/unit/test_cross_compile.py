"""The native pass compiles for systems that this one is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts")]
from cross_compile import SOURCES, SYSTEMS, compile_for, has_compiler  # noqa: E402  # pyright: ignore

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no compiler for other systems; pip install ziglang")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_question_which_sets_there_are_compiles(system: str, tmp_path: Path) -> None:
    assert compile_for(system, "sets.cpp", tmp_path).stat().st_size > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_pass_compiles(system: str, tmp_path: Path) -> None:
    assert SOURCES[-1] == "decoder.cpp" and compile_for(system, SOURCES[-1], tmp_path).stat().st_size > 0
