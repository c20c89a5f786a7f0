"""From an order to its answer: whole or as a stream, with a limit on time, and cancelled when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cache.contiguous import ContiguousCache
from outrider.cache.paged import PagedCache
from outrider.cache.prefixes import prefix_tree
from outrider.core.method import Method
from outrider.engine.job import Slots
from outrider.engine.memory import MemoryModel
from outrider.engine.replace_drafter import Learner
from outrider.engine.scheduler import Scheduler
from outrider.methods import METHODS
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.server.answers import AnswerBuilder
from outrider.server.audit import AuditLog
from outrider.server.disconnects import EventStream, unless_left
from outrider.server.failures import ApiError, busy, late
from outrider.server.intake import Intake
from outrider.server.json_text import JsonAnswer
from outrider.server.keys import KeyRing
from outrider.server.learning import ServerLearner
from outrider.server.metrics import Metrics
from outrider.server.queued_request import DEFAULT_LANE, FixedLane, Order, PredictedLane, method_of
from outrider.server.settings import ServerSettings
from outrider.server.spans import Ended, NoSpans, Spans, ToldRounds
from outrider.server.transcript import Added
from outrider.server.worker import Ticket, Worker

_CLIENT_LEFT = 499
_READING_ROUNDS = 0.5
"""Reading other requests' prompts makes a request take at most 1 + this many times as long."""
_LOGIT_COPIES = 2 * 4
"""Bytes per vocabulary entry of a node: raw and adjusted logits, float32."""


@final
class Service:
    """One model being served."""

    def __init__(
        self,
        llm: LLM,
        settings: ServerSettings,
        *,
        name: str | None = None,
        learner: Learner | None = None,
        install: Callable[[Any], None] | None = None,
        parent: str | None = None,
        spans: Spans | None = None,
    ) -> None:
        """The service of one model.

        ``learner`` hears of ended requests and may make a better draft (``server/learning.py``). ``install`` hands that draft
        to the model; the default is ``LLM.replace_draft``. ``parent`` is the model that an adapter was made for. ``spans``
        hears of ended requests.
        """
        self.parent = parent
        self.spans = spans or NoSpans()
        self.llm, self.settings = llm, settings
        self.name = name or ("outrider-bundled" if llm.model_name == bundled_path("target") else Path(llm.model_name).name)
        self.keys = KeyRing(settings.api_keys, Path(settings.api_key_file) if settings.api_key_file else None)
        self.audit = AuditLog(Path(settings.audit_log) if settings.audit_log else None)
        self.metrics = Metrics(model=self.name, method=llm.method_name, replica=settings.replica)
        self.intake = Intake(llm, settings, self.metrics)
        self._memory = _memory_model(llm, settings)
        self._install = install or llm.replace_draft
        server_learner = ServerLearner(learner, self.metrics, swap=self._swap)
        self.worker = Worker(self._new_scheduler, llm.codec, metrics=self.metrics, learner=server_learner)
        self.num_active = 0
        self.is_draining = False

    def _new_scheduler(self) -> Scheduler:
        settings = self.settings
        return Scheduler(
            self.llm.target,
            self._find_method,
            slots=Slots(settings.max_rows, settings.prefill_tokens, settings.grouping, _READING_ROUNDS),
            memory=self._memory,
            prefixes=prefix_tree(self.llm.target.new_cache(1), settings.prefix_bytes) if settings.prefix_bytes else None,
            device_lane=self.llm.rounds.lane,
        )

    def _find_method(self, lane: Any) -> Method:
        if isinstance(lane, PredictedLane):
            return self.llm.compose("reference", references=[list(lane.token_ids)])
        if isinstance(lane, FixedLane):
            return self._at_length(self._find_method(lane.method), lane)
        return self.llm.method if lane == DEFAULT_LANE else self.llm.compose(lane)

    def prepare(self, *, is_warm: bool) -> None:
        """Do in advance what would delay the first requests.

        This reads the vocabulary for grammars, and measures what rounds cost with the model's own method and with a
        prediction. Measuring takes a second, once per machine. Captured rounds are tried only if a warm-up made them.
        After that only the rounds of requests are measured.
        """
        self.intake.grammars.prepare()
        if is_warm or not self.llm.target.traits.can_be_captured:
            for lane in (DEFAULT_LANE, PredictedLane(())):
                self._find_method(lane).policy.start(1)
            self.llm.prices.is_serving = True

    def _at_length(self, method: Method, lane: FixedLane) -> Method:
        """A method with a fixed draft length. Its tree may have as many nodes as by default."""
        defaults = METHODS[lane.method or self.llm.method_name].defaults or {}
        nodes = max(defaults.get("num_tree_nodes", 0), lane.num_draft_tokens)
        return replace(method, policy=Fixed(FixedOptions(lane.num_draft_tokens, nodes)))

    def _swap(self, better: Any) -> None:
        """Give the learned weights to every lane whose drafter has weights."""
        self._install(better)
        named = {lane: method_of(lane) for lane in self.worker.scheduler.lanes}
        drafting = [lane for lane, name in named.items() if name == DEFAULT_LANE or (name and _has_weights(name))]
        self.worker.scheduler.redraft(drafting)

    def close(self) -> None:
        """Stop the engine and end the processes that compile grammars."""
        self.worker.stop()
        self.worker.learner.close()
        self.intake.close()
        self.audit.close()

    async def answer(
        self, http: HttpRequest, order: Coroutine[Any, Any, Order], builder: Callable[[Order], AnswerBuilder], *, stream: bool
    ) -> Response:
        """Run a request from order to answer."""
        try:
            self._check_room()
        except ApiError:
            order.close()
            raise
        self.num_active += 1
        run: _Run | None = None
        try:
            made: Order | None = await self._in_time(http, order)
            if made is None:
                return Response(status_code=_CLIENT_LEFT)
            self.metrics.prompt_tokens.inc(made.num_prompt_tokens)
            run = _Run(self, http, self.worker.submit(made), builder(made))
            return await (run.stream() if stream else run.whole())
        finally:
            if run is None or not run.is_streaming:
                self.num_active -= 1

    async def errand(self, http: HttpRequest, work: Generator[bool, None, Any]) -> Any:
        """The result of work on the engine's thread; None if the client left."""
        self._check_room()
        self.num_active += 1
        try:
            return await self._in_time(http, self.worker.run_errand(work))
        finally:
            self.num_active -= 1

    def _check_room(self) -> None:
        if self.num_active >= self.settings.max_requests:
            raise busy(self.settings.max_requests)
        if not self.worker.is_alive:
            raise ApiError(503, "the engine is not running (the log says why); restart the server", kind="server_error")

    async def _in_time(self, http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of work; None if the client left, which cancels the work."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await unless_left(http, work)
        except TimeoutError:
            raise late(self.settings.timeout_s) from None


@final
class _Run:
    """One running request."""

    def __init__(self, service: Service, http: HttpRequest, ticket: Ticket, answer: AnswerBuilder) -> None:
        self.service, self.http, self.ticket, self.answer = service, http, ticket, answer
        self.is_streaming = False
        self._first: float | None = None
        self._rounds = ToldRounds()
        self._deadline = asyncio.get_running_loop().time() + service.settings.timeout_s

    async def whole(self) -> Response:
        try:
            if not await unless_left(self.http, self._collect()):
                return Response(status_code=_CLIENT_LEFT)
            return JsonAnswer(self.answer.whole())
        finally:
            self.close()

    async def stream(self) -> Response:
        """Stream the answer. The first delta is awaited before the status is sent, so that refusals have a proper status."""
        deltas = self.ticket.deltas()
        try:
            first = await unless_left(self.http, self._next(deltas))
            if first is None:
                self.close()
                return Response(status_code=_CLIENT_LEFT)
        except BaseException:
            self.close()
            raise
        self.is_streaming = True
        return EventStream(self._events(first, deltas), self.close, limit_s=self.service.settings.timeout_s)

    def close(self) -> None:
        """Free what the request holds, however it ended."""
        if not self.answer.is_finished:
            self.service.worker.cancel(self.ticket)
        if self.is_streaming:
            self.service.num_active -= 1
        self._note()

    async def _collect(self) -> bool:
        deltas = self.ticket.deltas()
        while not self.answer.is_finished:
            self._add(await self._next(deltas))
        return True

    async def _next(self, deltas: AsyncIterator[Added]) -> Added:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(deltas)
        except TimeoutError:
            raise late(self.service.settings.timeout_s) from None

    def _add(self, delta: Added) -> None:
        if self._first is None:
            self._first = time.perf_counter()
            self.service.metrics.first_token.observe(self._first - self.ticket.created)
        if delta.told is not None:
            self._rounds.add(delta.told)
        self.answer.add(delta)

    async def _events(self, delta: Added, deltas: AsyncIterator[Added]) -> AsyncIterator[str]:
        try:
            while True:
                self._add(delta)
                for text in self.answer.stream_events(delta):
                    yield text
                if self.answer.is_finished:
                    break
                delta = await self._next(deltas)
        except ApiError as error:
            for text in self.answer.error_events(error):
                yield text
            return
        for text in self.answer.closing_events():
            yield text

    def _note(self) -> None:
        """Update the histograms, and return the request's log fields."""
        now, written = time.perf_counter(), self.answer.num_tokens
        self.service.metrics.latency.observe(now - self.ticket.created)
        if self._first is not None and written > 1:
            self.service.metrics.per_token.observe((now - self._first) / (written - 1))
        stats = self.answer.speculation()
        said = {"prompt_tokens": self.answer.order.num_prompt_tokens, "completion_tokens": written}
        said |= {"tokens_per_pass": round(stats["tokens_per_pass"], 3), "finished": self.answer.is_finished}
        self.http.scope.setdefault("outrider.log", {}).update(said)
        rounds = self._rounds.kept, self._rounds.num_left_out
        about = self._attributes(stats, written)
        ended = Ended(self.ticket.created, self._first, now, self.answer.is_finished, about, *rounds)
        self.service.spans.tell(ended, self.http.headers)

    def _attributes(self, stats: Mapping[str, Any], written: int) -> dict[str, Any]:
        """The attributes of the request's span."""
        usage = {"input_tokens": self.answer.order.num_prompt_tokens, "output_tokens": written}
        names = {"request.model": self.service.name, "response.model": self.service.name, "operation.name": "text_completion"}
        told = {f"gen_ai.usage.{name}": count for name, count in usage.items()}
        told |= {f"gen_ai.{name}": value for name, value in names.items()}
        told |= {f"outrider.{name}": stats[name] for name in ("num_passes", "num_drafted", "num_accepted", "tokens_per_pass")}
        return {**told, "outrider.method": stats["method"] or self.service.llm.method_name}


def _has_weights(method: str) -> bool:
    """Whether the method drafts with weights that can be trained."""
    row = METHODS[method]
    return row.needs_draft or "heads" in row.needs


def _memory_model(llm: LLM, settings: ServerSettings) -> MemoryModel:
    caches = [model.new_cache(1) for model in (llm.target, *llm.drafts)]
    known = [cache.token_bytes for cache in caches if isinstance(cache, ContiguousCache | PagedCache)]
    token_bytes = sum(known) if len(known) == len(caches) else 0
    page_len = caches[0].pool.page_len if isinstance(caches[0], PagedCache) else 0
    return MemoryModel(token_bytes, _LOGIT_COPIES * llm.target.vocab_size, settings.memory_budget, page_len)
