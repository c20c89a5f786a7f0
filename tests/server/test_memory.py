"""Memory after large requests, in bytes: nothing of a refused body is kept, and what is free goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import platform
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from hostile_cases import all_cases
from inprocess import bystander, run

from outrider.core.allocator import give_back, settle
from outrider.server import run as serving
from outrider.server import tidy
from outrider.server.service import Service

_MB = 1_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by themselves")
def test_free_pages_go_back_to_the_system() -> None:
    """Blocks that are still used lie between those that are free, so the heap cannot simply end earlier."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, blocks = 64_000, list[int]()
    for _ in range(1000):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    for index, block in enumerate(blocks):
        if index % 16:
            libc.free(block)
    held = _resident()
    give_back()
    assert held - _resident() > 40 * _MB
    for block in blocks[::16]:
        libc.free(block)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_of_large_bodies_is_kept() -> None:
    """What Python holds after the large cases twice is what it holds after them three times."""
    cases = [(case, case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()) for case in all_cases()]
    large = [(case, content) for case, content in cases if len(content) > 700_000]
    assert len(large) > 9

    async def send(client: Any) -> int:
        for case, content in large:
            answer = await client.request(case.method, case.path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code in case.statuses, (case.name, answer.text)
        await bystander(client)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async def work(service: Service, client: Any) -> None:
        del service
        tracemalloc.start()
        try:
            await send(client)
            first, again = await send(client), await send(client)
        finally:
            tracemalloc.stop()
        assert again - first < _MB, (first, again)

    run(work)


def test_large_bodies_are_tidied_up_after_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    monkeypatch.setattr(tidy, "_WAIT_S", 0.01)
    monkeypatch.setattr(tidy, "give_back", lambda: calls.append(1))

    async def main() -> None:
        found = tidy.Tidy()
        found.count(600_000)
        await asyncio.sleep(0.05)
        assert not calls, "too little to be worth it"
        for _ in range(5):
            found.count(600_000)
        while not calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(calls) == 1
        found.count(2 * _MB)
        while len(calls) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_was_loaded_is_not_searched_for_garbage() -> None:
    """A full collection with PyTorch loaded holds every thread, and with it everybody's answer."""
    before = len(gc.get_objects())
    try:
        settle()
        assert gc.get_freeze_count() > before / 2 and len(gc.get_objects()) < before / 2
    finally:
        gc.unfreeze()


def test_a_server_settles_before_it_says_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    monkeypatch.setattr(serving, "settle", lambda: order.append("settled"))

    class Started:
        started, should_exit = True, False

        async def serve(self, sockets: Any) -> None:
            order.append("served")

    async def work() -> None:
        with serving.bind("127.0.0.1", 0) as listener:
            server: Any = Started()
            await serving._serve(server, serving.Signals(lambda: None, None), listener, lambda port: order.append("ready"))

    asyncio.run(work())
    assert order.index("settled") < order.index("ready")
