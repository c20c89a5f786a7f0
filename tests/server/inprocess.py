"""The application in this process, with the bundled pair loaded once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx

from outrider import LLM
from outrider.engine.replace_drafter import Learner
from outrider.server.app import create_app
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

BYSTANDER = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": 11, "ignore_eos": True}


@cache
def bundled(**options: Any) -> LLM:
    return LLM(**options)


@asynccontextmanager
async def serving(llm: LLM, learner: Learner | None = None, **limits: Any) -> AsyncIterator[tuple[Service, Any]]:
    service = Service(llm, ServerSettings(**limits), learner=learner)
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    service.worker.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield service, client
    finally:
        service.close()


def run(work: Callable[[Service, Any], Awaitable[None]], *, llm: LLM | None = None, **limits: Any) -> None:
    async def main() -> None:
        async with serving(llm or bundled(), **limits) as (service, client):
            await work(service, client)

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what the engine does after its last answer: a moment on an idle machine, longer on a busy one."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)


async def until_counted(client: Any, line: str) -> None:
    """Waits until the metrics have a line."""
    async with asyncio.timeout(60):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.05)


async def bystander(client: Any, *, max_tokens: int = 24) -> str:
    """The text of a request that must not notice anything."""
    answer = await client.post("/v1/completions", json={**BYSTANDER, "max_tokens": max_tokens})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def engine_seen(service: Service) -> None:
    """Waits until the engine has done what it was given, and its gauges and counters were read after that."""
    await until(lambda: service.worker.scheduler.is_idle)
    await service.worker.run_errand(_ for _ in ())
