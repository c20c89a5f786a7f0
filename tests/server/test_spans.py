"""OpenTelemetry spans of requests: times, attributes, the caller's trace, failures; and that they are optional."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from inprocess import BYSTANDER, bundled  # noqa: E402

from outrider.core.errors import OptionError  # noqa: E402
from outrider.server.app import create_app  # noqa: E402
from outrider.server.service import Service  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402
from outrider.server.spans import MOST_ROUNDS, Ended, OpenTelemetrySpans, ToldRound, ToldRounds, exported_to  # noqa: E402


class _Told:
    def __init__(self) -> None:
        self.ended: list[tuple[Ended, dict[str, str]]] = []

    def tell(self, ended: Ended, headers: Any) -> None:
        self.ended.append((ended, dict(headers)))


def _ask(spans: Any, *bodies: dict[str, Any], **headers: str) -> list[Any]:
    service = Service(bundled(), ServerSettings(), spans=spans)

    async def main() -> list[Any]:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return [await client.post("/v1/completions", json=body, headers=headers) for body in bodies]

    service.worker.start()
    try:
        return asyncio.run(main())
    finally:
        service.close()


def test_whoever_is_told_learns_times_and_counts() -> None:
    told = _Told()
    answers = _ask(told, BYSTANDER, {**BYSTANDER, "stream": True}, {**BYSTANDER, "max_tokens": -1}, traceparent="x")
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert len(told.ended) == 2, "a request that is refused never reached the engine"
    for ended, headers in told.ended:
        assert ended.first_token is not None and ended.began < ended.first_token <= ended.over
        assert ended.is_finished and headers["traceparent"] == "x"
        assert ended.attributes["gen_ai.usage.output_tokens"] == BYSTANDER["max_tokens"]
        assert ended.attributes["outrider.method"] == "draft-model"
        assert not any(BYSTANDER["prompt"] in str(value) for value in ended.attributes.values())


def test_every_round_is_told_with_its_reason_up_to_a_limit() -> None:
    told = _Told()
    _ask(told, {**BYSTANDER, "n": 2})
    ((ended, _),) = told.ended
    assert {one.choice for one in ended.rounds} == {0, 1} and ended.num_left_out == 0
    assert sum(one.emitted for one in ended.rounds) == ended.attributes["gen_ai.usage.output_tokens"]
    assert sum(one.drafted for one in ended.rounds) == ended.attributes["outrider.num_drafted"]
    assert sum(one.accepted for one in ended.rounds) == ended.attributes["outrider.num_accepted"]
    assert len(ended.rounds) == ended.attributes["outrider.num_passes"]
    numbers = [one.number for one in ended.rounds if one.choice == 0]
    assert numbers == sorted(set(numbers)) and all(one.reason and one.seconds > 0 for one in ended.rounds)
    assert all(ended.began <= one.at <= ended.over for one in ended.rounds)
    many = ToldRounds()
    for number in range(MOST_ROUNDS + 3):
        many.add(ToldRound(0, 1.0, 0.1, number, 1, 0, 1, "given"))
    assert [one.number for one in many.kept] == list(range(MOST_ROUNDS)) and many.num_left_out == 3


def test_spans_reach_an_exporter_under_the_callers_trace() -> None:
    sdk = pytest.importorskip(
        "opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed; pip install outrider[otel]"
    )
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # pyright: ignore[reportMissingImports]

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    (answer,) = _ask(OpenTelemetrySpans(provider), BYSTANDER, traceparent=f"00-{trace}-{parent}-01")
    assert answer.status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"llm_request", "first_token", "further_tokens"}
    whole, first, further = (spans[name] for name in ("llm_request", "first_token", "further_tokens"))
    assert f"{whole.context.trace_id:032x}" == trace and f"{whole.parent.span_id:016x}" == parent
    assert first.parent.span_id == further.parent.span_id == whole.context.span_id
    assert whole.start_time == first.start_time < first.end_time == further.start_time <= further.end_time == whole.end_time
    assert whole.status.is_unset and whole.attributes["gen_ai.request.model"] == "outrider-bundled"
    rounds = [event for event in whole.events if event.name == "round"]
    assert len(rounds) == whole.attributes["outrider.num_passes"] and not whole.attributes["outrider.rounds_left_out"]
    assert sum(event.attributes["outrider.num_tokens"] for event in rounds) == BYSTANDER["max_tokens"]
    assert all(whole.start_time <= event.timestamp <= whole.end_time for event in rounds)
    exporter.clear()
    OpenTelemetrySpans(provider).tell(Ended(1.0, None, 2.0, False, {}), {})
    failed = {span.name: span for span in exporter.get_finished_spans()}
    assert set(failed) == {"llm_request", "first_token"} and not failed["llm_request"].status.is_ok
    assert failed["llm_request"].end_time - failed["llm_request"].start_time == pytest.approx(1e9, rel=1e-3)


def test_without_the_package_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name=name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(OptionError, match=r"outrider\[otel\]"):
        exported_to("http://127.0.0.1:4318/v1/traces", replica="0")
