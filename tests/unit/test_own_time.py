"""A thread's own seconds: what it waited for a processor is left out, where the system counts it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.core import own_time


class System:
    """Counts of a thread that tests write, in place of the system's."""

    def __init__(self, path: Path) -> None:
        self.path, self.wall, self.busy = path, 10.0, 3.0
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        self.path.write_text(f"1000000000 {int(seconds * 1e9)} 7\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    found = System(tmp_path / "schedstat")
    monkeypatch.setattr(own_time, "_COUNTS", str(found.path))
    clocks = SimpleNamespace(perf_counter=lambda: found.wall, thread_time=lambda: found.busy)
    monkeypatch.setattr(own_time, "time", clocks)
    monkeypatch.setattr(own_time, "_CLOCKS", own_time._Clocks())  # pyright: ignore[reportPrivateUsage]
    return found


def test_time_in_a_queue_for_a_processor_does_not_count(system: System) -> None:
    began = own_time.own_seconds()
    system.wall, system.busy = 12.0, 3.5
    system.wait(1.25)
    assert own_time.own_seconds() - began == 0.75


def test_a_span_is_at_least_what_the_thread_had_of_a_processor(system: System) -> None:
    began = own_time.own_seconds()
    system.wall, system.busy = 10.5, 3.25
    system.wait(0.75)  # the count is rough
    assert own_time.own_seconds() - began == 0.25


def test_a_span_is_at_most_the_walls(system: System) -> None:
    began = own_time.own_seconds()
    system.wall, system.busy = 10.25, 4.0
    assert own_time.own_seconds() - began == 0.25


def test_every_thread_reads_its_own_counts(system: System) -> None:
    system.path.unlink()
    spans = list[float]()

    def span() -> None:
        began = own_time.own_seconds()
        system.wall += 2.0
        spans.append(own_time.own_seconds() - began)

    thread = threading.Thread(target=span)
    thread.start()
    thread.join()
    assert spans == [2.0], "no counts for the new thread: nothing is left out"


def test_a_forked_child_opens_counts_of_its_own(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    own_time.own_seconds()
    system.path.rename(system.path.with_name("parent"))
    system.wait(5.0)  # before the child looked
    monkeypatch.setattr(own_time, "os", SimpleNamespace(**{**vars(os), "getpid": lambda: -1}))
    began = own_time.own_seconds()
    system.wall, system.busy = 11.5, 3.25
    system.wait(6.0)
    assert own_time.own_seconds() - began == 0.5


def test_sleep_counts_as_time() -> None:
    began = own_time.own_seconds()
    time.sleep(0.02)
    assert own_time.own_seconds() - began > 0
