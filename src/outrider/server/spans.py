"""OpenTelemetry spans: one for every request that reached the engine, with two below it, until the first token and after it.

Spans are made after a request has ended, with the recorded times, so that tracing costs nothing while it runs. Attributes have
the names of OpenTelemetry's conventions for generative models (``gen_ai.*``); what speculation did is under ``outrider.*``.
Texts are never in them. The request's rounds are events of its span, up to a limit; the rest are counted. A ``traceparent``
header that comes with a request makes its span part of the caller's trace.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from outrider.core.errors import OptionError

MOST_ROUNDS = 128
"""Rounds of a request that become events: as many events as OpenTelemetry's SDK keeps of a span by default."""


@final
@dataclass(frozen=True)
class ToldRound:
    """Result of one round for one text of a request."""

    choice: int
    at: float
    """When the round ended."""
    seconds: float
    number: int
    """Number of the target pass. Rounds of several requests with the same number shared it."""
    drafted: int
    accepted: int
    emitted: int
    reason: str
    """Code of why the round was planned so (``outrider why``); empty without a policy's plan."""

    def attributes(self) -> dict[str, Any]:
        """The attributes of the round's event."""
        told = {"choice": self.choice, "pass": self.number, "seconds": self.seconds, "reason": self.reason}
        told |= {"num_drafted": self.drafted, "num_accepted": self.accepted, "num_tokens": self.emitted}
        return {f"outrider.{name}": value for name, value in told.items()}


@final
@dataclass
class ToldRounds:
    """The first rounds of a request, and how many came after them."""

    kept: list[ToldRound] = field(default_factory=list)
    num_left_out: int = 0

    def add(self, told: ToldRound) -> None:
        """Keep a round while there is room."""
        if len(self.kept) < MOST_ROUNDS:
            self.kept.append(told)
        else:
            self.num_left_out += 1


@dataclass(frozen=True)
class Ended:
    """A finished request. Times are those of ``time.perf_counter``."""

    began: float
    first_token: float | None
    over: float
    is_finished: bool
    """False if it failed or its client left."""
    attributes: Mapping[str, Any]
    rounds: Sequence[ToldRound] = ()
    """The request's first rounds, in order."""
    num_left_out: int = 0
    """Rounds after them."""


class Spans(Protocol):
    """Receives every finished request as a span."""

    def tell(self, ended: Ended, headers: Mapping[str, str]) -> None: ...


@final
class NoSpans:
    """Discards the spans."""

    def tell(self, ended: Ended, headers: Mapping[str, str]) -> None:
        del ended, headers


@final
class OpenTelemetrySpans:
    """Sends spans to an OpenTelemetry tracer."""

    def __init__(self, provider: Any) -> None:
        """``provider`` is a TracerProvider with its exporters."""
        from opentelemetry.trace import SpanKind, Status, StatusCode  # pyright: ignore[reportMissingImports]
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # pyright: ignore[reportMissingImports]

        self._tracer = provider.get_tracer("outrider")
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._read = TraceContextTextMapPropagator().extract

    def tell(self, ended: Ended, headers: Mapping[str, str]) -> None:
        shift = time.time_ns() - int(1e9 * time.perf_counter())
        at = {name: shift + int(1e9 * moment) for name, moment in _moments(ended).items()}
        whole = self._tracer.start_span(
            "llm_request",
            context=self._read(dict(headers)),
            kind=self._kind,
            attributes={**ended.attributes, "outrider.rounds_left_out": ended.num_left_out},
            start_time=at["began"],
        )
        if not ended.is_finished:
            whole.set_status(self._failed)
        for told in ended.rounds:
            whole.add_event("round", told.attributes(), timestamp=shift + int(1e9 * told.at))
        self._below(whole, "first_token", at["began"], at["first_token"])
        if at["over"] > at["first_token"]:
            self._below(whole, "further_tokens", at["first_token"], at["over"])
        whole.end(end_time=at["over"])

    def _below(self, whole: Any, name: str, start: int, end: int) -> None:
        from opentelemetry.trace import set_span_in_context  # pyright: ignore[reportMissingImports]

        self._tracer.start_span(name, context=set_span_in_context(whole), start_time=start).end(end_time=end)


def _moments(ended: Ended) -> dict[str, float]:
    first = ended.over if ended.first_token is None else ended.first_token
    return {"began": ended.began, "first_token": first, "over": ended.over}


def exported_to(endpoint: str, *, replica: str) -> OpenTelemetrySpans:
    """Spans sent to a collector over HTTP, in OpenTelemetry's protocol."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise OptionError(f"--otlp-endpoint needs the package {error.name!r}; pip install 'outrider[otel]'") from None
    resource = Resource.create({"service.name": "outrider", "service.instance.id": replica})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OpenTelemetrySpans(provider)
