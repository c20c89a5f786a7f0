"""The engine's thread: takes orders, runs rounds while there is work, and sends out the new tokens of each round.

One thread owns the scheduler, so nothing in it is shared. Orders and cancellations come in through a queue that is emptied
between rounds. Tokens go out through the event loop of the client's request. A slow reader fills its own queue, bounded by the
tokens it asked for, and delays nobody. A failure in one request (its grammar, its drafter, its text) ends that request alone.
If the engine itself fails, all its requests end with an error, and it starts again empty.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from outrider.codecs.text import TextCodec
from outrider.core.errors import OutriderError
from outrider.core.report import Progress, RoundReport
from outrider.core.request import RequestState
from outrider.engine.job import Job
from outrider.engine.scheduler import Scheduler
from outrider.server.failures import ApiError, broken, failed
from outrider.server.intake import refusal
from outrider.server.learning import ServerLearner
from outrider.server.metrics import Metrics
from outrider.server.model_errands import Errand
from outrider.server.prompt_scores import PromptScores
from outrider.server.queued_request import Order, is_passing
from outrider.server.transcript import Added, SharedPass, Transcript

_LOG = logging.getLogger("outrider.server")
_IDLE_S = 0.2


@final
@dataclass(eq=False)
class Ticket:
    """An order in the worker, and the queue back to its client."""

    order: Order
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Added | ApiError]
    created: float = field(default_factory=time.perf_counter)
    ids: list[int] = field(default_factory=list)
    choices: list[tuple[RequestState, Transcript]] = field(default_factory=list)
    """Choices that wait for their prompts' scores."""

    def tell(self, event: Added | ApiError) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # its loop is closed: nobody waits any more
            return

    async def deltas(self) -> AsyncIterator[Added]:
        """The deltas of the order, until all of its choices are finished."""
        open_choices = len(self.order.requests)
        while open_choices:
            event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            open_choices -= event.finish_reason is not None
            yield event


@final
class Worker:
    """Runs orders on a thread of its own."""

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        codec: TextCodec,
        *,
        metrics: Metrics,
        learner: ServerLearner,
    ) -> None:
        """``make_scheduler`` is called again after a failure."""
        self.learner = learner
        self._make_scheduler = make_scheduler
        self._codec = codec
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | Errand | None]] = queue.SimpleQueue()
        self._errands: deque[Errand] = deque()
        self._numbers, self._passes = itertools.count(), itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._transcripts: dict[int, Transcript] = {}
        self._scoring: list[tuple[Ticket, dict[tuple[int, ...], PromptScores]]] = []
        """Orders whose prompts are scored first, with the scores so far."""
        self.scheduler = make_scheduler()
        self.num_failures = 0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, order: Order) -> Ticket:
        """Submit an order from the event loop. Its results arrive in ``Ticket.deltas``."""
        ticket = Ticket(order, asyncio.get_running_loop(), asyncio.Queue())
        self._inbox.put(("submit", ticket))
        return ticket

    async def run_errand(self, work: Generator[bool, None, Any]) -> Any:
        """Run work between rounds and return its result. Called from the event loop."""
        errand = Errand(work, asyncio.get_running_loop().create_future())
        self._inbox.put(("errand", errand))
        return await errand.result

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose client has left. Its slots are free within a round."""
        self._inbox.put(("cancel", ticket))

    def stop(self, timeout_s: float = 10.0) -> None:
        self._inbox.put(("stop", None))
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._take_orders():
            try:
                self._metrics.engine(self.scheduler)
                self.learner.between_rounds(is_idle=self.scheduler.is_idle)
                if self._scoring:
                    self._score()
                if self._errands:
                    self._run_piece()
                if not self.scheduler.is_idle:
                    self._hand_out(self.scheduler.round())
                else:
                    self.scheduler.check_integrity()
            except Exception as error:
                self._recover(error)

    def _run_piece(self) -> None:
        """Do a piece of the first errand. Errands take turns, so that a large one holds up no other."""
        if self._errands[0].advance(self._failure):
            self._errands.popleft()
        elif self._errands[0].can_wait:
            self._errands.rotate(-1)

    def _take_orders(self) -> bool:
        """Empty the inbox, waiting for something if nothing runs. False if it is time to stop."""
        try:
            wait = self.scheduler.is_idle and not self._scoring and not self._errands
            while True:
                action, given = self._inbox.get(timeout=_IDLE_S) if wait else self._inbox.get_nowait()
                wait = False
                if given is None:
                    self._fail(ApiError(503, "the server is shutting down; try another one", kind="server_error"))
                    return False
                self._errands.append(given) if isinstance(given, Errand) else self._handle(action, given)
        except queue.Empty:
            return True

    def _handle(self, action: str, ticket: Ticket) -> None:
        try:
            self._enter(ticket) if action == "submit" else self._leave(ticket)
        except Exception as error:
            ticket.tell(broken(type(error).__name__))
            self._recover(error)

    def _enter(self, ticket: Ticket) -> None:
        try:
            choices = self._choices(ticket.order)
        except Exception as error:  # whatever it is, it came with this order
            self._retire(ticket.order)
            ticket.tell(self._failure(error))
            return
        ticket.choices = choices
        if ticket.order.prompt_logprobs is None:
            self._admit(ticket)
        else:
            self._scoring.append((ticket, {}))

    def _admit(self, ticket: Ticket) -> None:
        """Add an order's choices to the scheduler."""
        order, choices = ticket.order, ticket.choices
        ticket.choices = []
        for state, transcript in choices:
            if order.is_scored_only:
                ticket.tell(transcript.only_scored())
                continue
            number = next(self._numbers)
            ticket.ids.append(number)
            self._tickets[number] = ticket
            self._transcripts[number] = transcript
            self.scheduler.submit(Job(number, state, order.lane, order.priority, order.shares_prefix, traced=order.trace))

    def _score(self) -> None:
        """Score more tokens of the first waiting order's prompts. Admit the order when all are scored."""
        ticket, known = self._scoring[0]
        try:
            for state, transcript in ticket.choices:
                ids = tuple(state.request.prompt_ids)
                if ids not in known:
                    known[ids] = PromptScores(self.scheduler.target, ids, ticket.order.prompt_logprobs or 0)
                if not known[ids].is_done:
                    known[ids].advance()
                    return
                transcript.prompt = known[ids].entries
        except Exception as error:
            ticket.choices = []
            ticket.tell(self._failure(error))
        del self._scoring[0]
        self._admit(ticket)

    def _choices(self, order: Order) -> list[tuple[RequestState, Transcript]]:
        for request in order.requests:
            self.scheduler.check(request, order.lane)
        return [
            (RequestState.of(request, max_draft=order.max_draft), Transcript(choice, request, self._codec, traced=order.trace))
            for choice, request in enumerate(order.requests)
        ]

    def _leave(self, ticket: Ticket) -> None:
        self._scoring = [waiting for waiting in self._scoring if waiting[0] is not ticket]
        num_left = self._drop(ticket)
        self._metrics.cancelled.inc(num_left)
        self._metrics.finished.labels("abort").inc(num_left)

    def _drop(self, ticket: Ticket) -> int:
        """Drop all remaining choices of an order; returns their number."""
        left = [number for number in ticket.ids if number in self._tickets]
        for number in left:
            self.scheduler.cancel(number)
            self._forget(number)
        return len(left)

    def _forget(self, number: int) -> None:
        order = self._tickets[number].order
        del self._tickets[number], self._transcripts[number]
        self._retire(order)

    def _retire(self, order: Order) -> None:
        if is_passing(order.lane):
            self.scheduler.retire(order.lane)

    def _hand_out(self, reports: Sequence[RoundReport]) -> None:
        for seconds in self.scheduler.last_waits:
            self._metrics.queue_time.observe(seconds)
        for report in reports:
            self._metrics.round(report)
            shared = SharedPass(next(self._passes), len(report.ids), len(report.ids) + sum(report.drafted))
            for step in report.progress():
                ticket = self._tickets.get(step.request)  # None: another choice of its order failed in this round
                if ticket is not None:
                    self._hand_over(ticket, step, shared)

    def _hand_over(self, ticket: Ticket, step: Progress, shared: SharedPass) -> None:
        try:
            if step.state.failure is not None:
                raise step.state.failure
            added = self._transcripts[step.request].advance(step, shared)
        except Exception as error:
            self._metrics.finished.labels("error").inc(self._drop(ticket))
            ticket.tell(self._failure(error))
            return
        if step.state.is_finished:
            self._forget(step.request)
            self._metrics.finished.labels(added.finish_reason or "").inc()
        ticket.tell(added)
        if step.state.is_finished:
            self.learner.ended(step.state)

    def _failure(self, error: Exception) -> ApiError:
        """The error for an order that failed: its request was not possible, or there is a defect."""
        if isinstance(error, OutriderError):
            return refusal(error)
        _LOG.error("a request failed", exc_info=error)
        self._metrics.request_failures.inc()
        return failed(type(error).__name__)

    def _recover(self, error: Exception) -> None:
        """After a defect: end all requests with an error, and start the engine again."""
        _LOG.error("the engine failed", exc_info=error)
        self.num_failures += 1
        self._metrics.failures.inc()
        self._fail(broken(type(error).__name__))
        self.scheduler.give_up()
        self.scheduler = self._make_scheduler()

    def _fail(self, error: ApiError) -> None:
        waiting = [ticket for ticket, _ in self._scoring]
        for ticket in {id(ticket): ticket for ticket in (*self._tickets.values(), *waiting)}.values():
            ticket.tell(error)
        for errand in self._errands:
            errand.fail(error)
        self._errands.clear()
        self._scoring.clear()
        self._tickets.clear()
        self._transcripts.clear()
