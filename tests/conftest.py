"""Shared by all tests: what a process prepares before it runs them, no chance, and where optional data lies."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from native_build import begin_build, wait_for_build
from tiers import choose_tier


def pytest_configure(config: pytest.Config) -> None:
    choose_tier(config.option.markexpr)
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        begin_build()  # workers will be started, and this process runs no test
    else:
        import prepared  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """The native pass is there before the first test: tests read standard error, where a first build says that it is building.
    Modules and tests stay until the end, so no collection of garbage needs to look at them."""
    if not session.config.option.collectonly:
        wait_for_build()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test draws the same numbers each time."""
    from prepared import draw_the_same_numbers

    draw_the_same_numbers(monkeypatch)


@pytest.fixture
def started_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Companion processes are started as users have them, not forked."""
    from prepared import start_companions

    start_companions(monkeypatch)


SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """A real pretrained checkpoint, when the data folder is there."""
    folder = SHARED / "models" / "stories15M"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder
