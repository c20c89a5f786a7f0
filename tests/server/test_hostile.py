"""Hostile requests, each beside a bystander whose text is checked: no 5xx, no restart, nothing held afterwards.

Latencies are recorded, not judged: the slowest bystander and the longest hold of the event loop are printed at the end (-s).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from hostile_cases import Case, all_cases
from inprocess import bundled, bystander, serving, until

from outrider.server.service import Service


class _Site:
    """A server on a loop in a thread, for all cases."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._context = serving(bundled(), grammar_timeout_s=5.0)
        self.service: Service
        self.client: Any
        self.service, self.client = self.do(self._context.__aenter__())
        self.quiet = self.do(bystander(self.client, max_tokens=8))
        self.slowest: dict[str, tuple[float, float]] = {}
        """Seconds of the bystander, and the longest that the event loop stood still, by case."""

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def close(self) -> None:
        self.do(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def attacked(self, case: Case) -> tuple[Any, str]:
        """The answer to a case, and the bystander's text meanwhile."""
        content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        pulse = asyncio.ensure_future(_longest_pause())
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        attack = asyncio.ensure_future(self.client.request(case.method, case.path, content=content, headers=headers))
        text = await bystander(self.client, max_tokens=8)
        seconds = time.perf_counter() - began
        answer = await attack
        pulse.cancel()
        self.slowest[case.name] = seconds, await pulse
        return answer, text


async def _longest_pause() -> float:
    longest, last = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0.002)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    except asyncio.CancelledError:
        return longest


@pytest.fixture(scope="module")
def site() -> Iterator[_Site]:
    site = _Site()
    yield site
    site.close()
    for column, noun in ((0, "slowest bystander"), (1, "longest pause of the event loop")):
        found = [(times[column], name) for name, times in site.slowest.items()]
        print(f"{noun} (seconds, case): {max(found, default=None)}")


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_a_hostile_request_reaches_nobody_else(site: _Site, case: Case) -> None:
    answer, text = site.do(site.attacked(case))
    assert answer.status_code in case.statuses, answer.text[:500]
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"} and len(answer.text) < 4000
    assert text == site.quiet
    assert site.service.worker.num_failures == 0 and site.service.worker.is_alive


def test_nothing_is_held_after_all_of_it(site: _Site) -> None:
    scheduler = site.service.worker.scheduler
    assert site.do(bystander(site.client, max_tokens=8)) == site.quiet
    site.do(until(lambda: scheduler.is_idle and site.service.num_active == 0))
    scheduler.check_integrity()
    assert site.service.intake.grammars.cache.num_bytes <= site.service.settings.grammar_cache_bytes
    text = site.do(site.client.get("/metrics")).text
    assert "outrider:engine_failures_total 0.0" in text and "outrider:request_failures_total 0.0" in text


def test_there_are_more_than_a_hundred_cases() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) > 120
