"""A thread's own seconds: what it waited for a processor is left out, where the system counts it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.core import own_time


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the system's counts, and a clock that stands at ten."""
    path = tmp_path / "schedstat"
    path.write_text("1000000000 2500000000 7\n")
    monkeypatch.setattr(own_time, "_COUNTS", str(path))
    monkeypatch.setattr(own_time, "time", SimpleNamespace(perf_counter=lambda: 10.0))
    monkeypatch.setattr(own_time, "_QUEUE", own_time._Queue())  # pyright: ignore[reportPrivateUsage]
    return path


def test_time_in_a_queue_for_a_processor_does_not_count(counts: Path) -> None:
    assert own_time.own_seconds() == 7.5
    counts.write_text("1000000000 4000000000 9\n")
    assert own_time.own_seconds() == 6.0


def test_every_thread_reads_its_own_counts(counts: Path) -> None:
    assert own_time.own_seconds() == 7.5
    counts.unlink()
    found = list[float]()
    thread = threading.Thread(target=lambda: found.append(own_time.own_seconds()))
    thread.start()
    thread.join()
    assert found == [10.0], "no counts for the new thread: nothing is left out"


def test_a_forked_child_opens_counts_of_its_own(counts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_time.own_seconds() == 7.5
    counts.rename(counts.with_name("parent"))
    counts.write_text("0 1000000000 1\n")
    monkeypatch.setattr(own_time, "os", SimpleNamespace(**{**vars(os), "getpid": lambda: -1}))
    assert own_time.own_seconds() == 9.0


def test_sleep_counts_as_time() -> None:
    began = own_time.own_seconds()
    time.sleep(0.02)
    assert own_time.own_seconds() - began > 0
