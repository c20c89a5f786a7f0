"""Grammars of requests: limits with names, a deadline, fairness, cancellation, a cache bounded by bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")

from inprocess import bundled, bystander, run, until

from outrider.codecs.grammar import serialised_tokenizer
from outrider.codecs.grammar_source import json_schema_source, regex_source
from outrider.server import trial as trials
from outrider.server.failures import ApiError
from outrider.server.fairness import FairSlots
from outrider.server.grammars import GrammarCache
from outrider.server.service import Service
from outrider.server.trial import TrialEnded, TrialProcess, first_line


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _asked(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {"prompt": "A card: ", "max_tokens": 8, "response_format": wanted}


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        (_optional(500), "invalid_grammar"),
        (_optional(10_000), "grammar_too_large"),
        (_deep(80), "grammar_too_deep"),
        ({"enum": []}, "invalid_grammar"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "invalid_grammar"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "invalid_grammar"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "invalid_grammar"),
        ({"x-guidance": 3}, "invalid_grammar"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_by_name(schema: Any, code: str) -> None:
    async def work(service: Service, client: Any) -> None:
        quiet = await bystander(client)
        answer, text = await asyncio.gather(client.post("/v1/completions", json=_asked(schema)), bystander(client))
        assert answer.status_code == 400 and answer.json()["error"]["code"] == code, answer.text
        assert text == quiet and service.worker.num_failures == 0

    run(work)


def _stop(service: Service) -> Any:
    """Let the idle process hang, as one that compiles for ever would."""
    trial = next(iter(service.intake.grammars._idle))
    os.kill(trial._process.pid, signal.SIGSTOP)
    return trial


def test_a_grammar_that_takes_too_long_is_killed_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that hangs has little time by the clock, and those that must succeed have much."""

    async def work(service: Service, client: Any) -> None:
        quiet = await bystander(client)
        assert (await client.post("/v1/completions", json=_asked({"type": "integer"}))).status_code == 200
        trial = _stop(service)
        with monkeypatch.context() as short:
            short.setattr(trials, "_PATIENCE", 0.01)
            asked = client.post("/v1/completions", json=_asked({"type": "null"}))
            slow, text = await asyncio.gather(asked, bystander(client))
        assert slow.status_code == 400 and slow.json()["error"]["code"] == "grammar_timeout"
        assert text == quiet and not trial.is_alive
        assert "outrider:grammars_killed_total 1.0" in (await client.get("/metrics")).text
        assert (await client.post("/v1/completions", json=_asked({"type": "boolean"}))).status_code == 200  # a new process

    run(work, grammar_timeout_s=30.0)


def test_who_leaves_stops_the_compilation() -> None:
    async def work(service: Service, client: Any) -> None:
        grammars = service.intake.grammars
        await grammars.get(regex_source("a"), "me")
        trial = _stop(service)
        began = asyncio.ensure_future(grammars.get(regex_source("b"), "me"))
        await until(lambda: trial not in grammars._idle)
        began.cancel()
        with pytest.raises(asyncio.CancelledError):
            await began
        assert not trial.is_alive
        assert await grammars.get(regex_source("b"), "me") is not None

    run(work, grammar_timeout_s=100.0)


def test_a_process_that_was_killed_while_it_waited_is_replaced() -> None:
    async def work(service: Service, client: Any) -> None:
        for pattern in ("a", "b"):
            body = {"prompt": "Say", "guided_regex": pattern, "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == pattern
            trial = next(iter(service.intake.grammars._idle))
            os.kill(trial._process.pid, signal.SIGKILL)
            trial._process.wait()

    run(work)


def test_a_process_that_was_killed_at_work_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with its grammar. If all of them are killed, that is the server's error."""

    async def work(service: Service, client: Any) -> None:
        grammars = service.intake.grammars
        await grammars.get(regex_source("a"), "me")
        trial = _stop(service)
        asked = asyncio.ensure_future(grammars.get(regex_source("b"), "me"))
        await until(lambda: trial not in grammars._idle)
        os.kill(trial._process.pid, signal.SIGKILL)
        assert await asked is not None
        assert "outrider:grammars_killed_total 0.0" in (await client.get("/metrics")).text
        monkeypatch.setattr(TrialProcess, "ask", _killed)
        answer = await client.post("/v1/completions", json=_asked({"type": "null"}))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "grammar_process_killed"

    run(work, grammar_timeout_s=100.0)


def _killed(trial: TrialProcess, source: str, *, seconds: float) -> Any:
    os.kill(trial._process.pid, signal.SIGKILL)
    return trial._exchange(source.encode(), seconds)


def test_a_trial_has_only_so_much_memory() -> None:
    codec = bundled().codec
    trial = TrialProcess(first_line(serialised_tokenizer(codec), sorted(codec.eos_ids), max_bytes=4_000_000))
    with pytest.raises(TrialEnded):
        trial.ask(json_schema_source(_optional(3000)).text, seconds=60)
    trial.close()
    assert not trial.is_alive


def test_a_trial_has_only_so_much_processor_time() -> None:
    codec = bundled().codec
    trial = TrialProcess(first_line(serialised_tokenizer(codec), sorted(codec.eos_ids), max_bytes=10**9))
    assert not trial.ask(regex_source("a").text, seconds=30).error
    with pytest.raises(TrialEnded):
        trial.ask(json_schema_source(_optional(3000)).text, seconds=0.05)
    trial.close()


def test_a_trial_yields_to_the_engine_and_never_starts_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = list[str]()
    begin = TrialProcess.__init__

    def started(trial: TrialProcess, first: bytes) -> None:
        starting.append(threading.current_thread().name)
        begin(trial, first)

    monkeypatch.setattr(TrialProcess, "__init__", started)

    async def work(service: Service, client: Any) -> None:
        del client
        await service.intake.grammars.get(regex_source("a"), "me")
        (trial,) = service.intake.grammars._idle
        yielded = os.getpriority(os.PRIO_PROCESS, trial._process.pid) - os.getpriority(os.PRIO_PROCESS, 0)
        assert yielded > 0
        assert starting and all(name.startswith("outrider-grammars") for name in starting)

    run(work)


def test_who_leaves_while_a_process_starts_leaves_it_to_the_next() -> None:
    async def work(service: Service, client: Any) -> None:
        del client
        grammars = service.intake.grammars
        began = asyncio.ensure_future(grammars._new_trial(grammars._ready()))
        await asyncio.sleep(0)
        began.cancel()
        with pytest.raises(asyncio.CancelledError):
            await began
        await until(lambda: bool(grammars._idle))
        (trial,) = grammars._idle
        assert trial.is_alive

    run(work)


def test_clients_take_turns() -> None:
    async def main() -> list[str]:
        slots, order = FairSlots(1, max_waiting=8), list[str]()

        async def use(client: str) -> None:
            async with slots.place(client):
                order.append(client)
                await asyncio.sleep(0)

        await asyncio.gather(*(use(client) for client in ["first", *["greedy"] * 5, "modest"]))
        return order

    assert asyncio.run(main()) == ["first", "greedy", "modest", *["greedy"] * 4]


def test_one_client_may_not_queue_without_end_and_a_waiting_one_may_leave() -> None:
    async def main() -> None:
        slots = FairSlots(1, max_waiting=1)
        async with slots.place("a"):
            waiting = asyncio.ensure_future(slots._enter("a"))
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="wait to be compiled"):
                await slots._enter("a")
            waiting.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            async with slots.place("b"):
                pass

    asyncio.run(main())


def test_the_cache_is_bounded_by_bytes() -> None:
    cache = GrammarCache(100)
    sources = [regex_source(letter) for letter in "abcd"]
    for source in sources:
        cache.keep(source, source, 40)  # type: ignore[arg-type]
        assert cache.num_bytes <= 100
    assert cache.find(sources[0]) is None and cache.find(sources[3]) is sources[3]
    cache.keep(sources[0], sources[0], 400)  # type: ignore[arg-type]
    assert cache.num_bytes == 0


def test_a_process_without_work_ends_and_the_next_grammar_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[TrialProcess]()
    close = TrialProcess.close

    def closed(trial: TrialProcess) -> None:
        close(trial)
        ended.append(trial)

    monkeypatch.setattr(TrialProcess, "close", closed)

    async def work(service: Service, client: Any) -> None:
        del client
        grammars = service.intake.grammars
        await grammars.get(regex_source("a"), "me")
        await until(lambda: bool(ended))
        assert not grammars._idle and await grammars.get(regex_source("b"), "me") is not None

    run(work, grammar_idle_s=0.05)
