"""What is counted: how requests ended and waited, by which method, and that a restart of the engine loses none of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import engine_seen, run

from outrider.server.service import Service

_GUESSES = ("draft", "accepted", "wasted")


def test_metrics_say_how_requests_ended_waited_and_by_which_method() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": "Once upon a time there was a fox. " * 4, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        for more in ({}, {"speculation": {"method": "suffix"}}, {"stop": [" "]}):
            assert (await client.post("/v1/completions", json={**body, **more})).status_code == 200
        await engine_seen(service)
        text = (await client.get("/metrics")).text
        assert f'outrider:server_info{{method="{service.llm.method_name}",model="{service.name}",replica="0"}} 1.0' in text
        assert 'outrider:request_success_total{finished_reason="length"} 2.0' in text
        assert 'outrider:request_success_total{finished_reason="stop"} 1.0' in text
        assert "outrider:request_queue_time_seconds_count 3.0" in text
        assert 'outrider:method_tokens_total{method="suffix"} 4.0' in text and 'method="default"' in text
        hits = next(line for line in text.splitlines() if line.startswith("outrider:prefix_cache_hit_tokens_total "))
        assert float(hits.split()[1]) > 0

    run(work)


def test_metrics_say_why_so_much_was_guessed_and_what_was_in_vain() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, "seed": 1}
        for speculation in ({"max_tokens": 0}, {"num_draft_tokens": 3}):
            assert (await client.post("/v1/completions", json={**body, "speculation": speculation})).status_code == 200
        await engine_seen(service)
        lines = (await client.get("/metrics")).text.splitlines()
        found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
        rounds = sum(value for name, value in found.items() if name.startswith("outrider:rounds_by_reason_total{"))
        assert found['outrider:rounds_by_reason_total{reason="given"}'] > 0 and rounds > 12
        drafted, accepted, wasted = (found[f"outrider:spec_decode_num_{name}_tokens_total"] for name in _GUESSES)
        assert drafted > 0 and wasted == drafted - accepted
        assert found["outrider:kv_cache_usage_perc"] == 0

    run(work)


def test_counters_go_on_when_the_engine_is_started_anew() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": "Once upon a time there was a fox. " * 4, "max_tokens": 2, "ignore_eos": True}

        async def hits() -> float:
            await engine_seen(service)
            lines = (await client.get("/metrics")).text.splitlines()
            return next(float(one.split()[1]) for one in lines if one.startswith("outrider:prefix_cache_hits_total "))

        for _ in range(3):
            await client.post("/v1/completions", json=body)
        before = await hits()

        def explode() -> Any:
            raise RuntimeError("planted")

        service.worker.scheduler.round = explode  # type: ignore[method-assign]
        assert (await client.post("/v1/completions", json=body)).status_code == 500
        for _ in range(2):
            await client.post("/v1/completions", json=body)
        assert before >= 1 and await hits() == before + 1

    run(work)
