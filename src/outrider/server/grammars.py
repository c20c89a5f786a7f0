"""Grammars of requests: compiled outside the event loop, within limits, and fairly among clients.

A grammar is tried first in a process of its own (``trial.py``), which is killed at the deadline or when its client leaves. A
grammar that passed is compiled here, which is then known to end. Compiled grammars are kept, as many as fit a number of bytes.
A server reads its vocabulary for grammars before it is ready (``prepare``), because that holds the interpreter.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from outrider.codecs.grammar import GrammarCompiler, not_usable, serialised_tokenizer
from outrider.codecs.grammar_source import GrammarSource, GrammarTooDeepError, GrammarTooLargeError
from outrider.codecs.text import TextCodec
from outrider.core.errors import OutriderError
from outrider.core.params import Grammar
from outrider.server.failures import ApiError
from outrider.server.fairness import FairSlots
from outrider.server.metrics import Metrics
from outrider.server.settings import ServerSettings
from outrider.server.trial import TrialEnded, TrialLost, TrialProcess, Tried, first_line

_FEWEST_BYTES = 16_384
"""Least size that a compiled grammar is counted as."""
_TRIES = 3
"""Number of processes that try a grammar, if somebody else kills them, before it is given up."""
_BYTES_PER_LETTER = 32
"""Least memory of a compiled grammar per character of its source."""


@final
class GrammarCache:
    """The most recently used grammars, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[GrammarSource, tuple[Grammar, int]] = OrderedDict()

    def find(self, source: GrammarSource) -> Grammar | None:
        if source not in self._kept:
            return None
        self._kept.move_to_end(source)
        return self._kept[source][0]

    def keep(self, source: GrammarSource, grammar: Grammar, num_bytes: int) -> None:
        if source in self._kept:
            self.num_bytes -= self._kept.pop(source)[1]
        self._kept[source] = grammar, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1][1]


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """One tokenizer, read for grammars."""

    compiler: GrammarCompiler
    first: bytes
    """The first line that a new process reads."""


@final
class Grammars:
    """Compiles the grammars that requests ask for."""

    def __init__(self, codec: TextCodec, settings: ServerSettings, metrics: Metrics) -> None:
        self._codec, self._settings, self._metrics = codec, settings, metrics
        self.cache = GrammarCache(settings.grammar_cache_bytes)
        self._slots = FairSlots(settings.grammar_workers, max_waiting=settings.grammar_queue)
        self._threads = ThreadPoolExecutor(settings.grammar_workers, "outrider-grammars")
        self._idle: dict[TrialProcess, asyncio.TimerHandle] = {}
        """Idle processes, each with the timer that ends it."""
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None

    def prepare(self) -> None:
        """Read the vocabulary now. If grammars are unavailable, requests for them say why."""
        with suppress(ApiError):
            self._ready()

    async def get(self, source: GrammarSource, client: str) -> Grammar:
        """The grammar, compiled or cached. Cancelling the wait cancels the compilation."""
        found = self.cache.find(source)
        if found is not None:
            return found
        async with self._slots.place(client):
            return self.cache.find(source) or await self._compile(source)  # another client may have asked for the same

    def close(self) -> None:
        """End the processes."""
        for trial, ending in self._idle.items():
            ending.cancel()
            trial.close()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, source: GrammarSource) -> Grammar:
        loop = asyncio.get_running_loop()
        ready = await loop.run_in_executor(self._threads, self._ready)
        tried = await self._tried(source, ready)
        if tried.error:
            raise grammar_refusal(not_usable(source, tried.error))
        grammar = await loop.run_in_executor(self._threads, _compiled, ready.compiler, source)
        counted = max(tried.num_bytes, _BYTES_PER_LETTER * len(source.text), _FEWEST_BYTES)
        self.cache.keep(source, grammar, counted)
        self._metrics.grammar_bytes.set(self.cache.num_bytes)
        return grammar

    async def _tried(self, source: GrammarSource, ready: _Vocabulary) -> Tried:
        """The result of a trial. If somebody kills its process, another process tries again."""
        for _ in range(_TRIES):
            with suppress(TrialLost):
                return await self._try(source, await self._living_trial() or await self._new_trial(ready))
        message = f"the process that compiled the {source.noun} was killed; try again in a moment"
        raise ApiError(503, message, kind="server_error", code="grammar_process_killed")

    async def _try(self, source: GrammarSource, trial: TrialProcess) -> Tried:
        seconds = self._settings.grammar_timeout_s
        asked = asyncio.get_running_loop().run_in_executor(self._threads, lambda: trial.ask(source.text, seconds=seconds))
        is_well = False
        try:
            tried = await asked
            is_well = True
        except TrialEnded:
            self._metrics.grammars_killed.inc()
            message = f"the {source.noun} took over {seconds:g} s of processor time or too much memory; make it smaller"
            raise ApiError(400, message, param="response_format", code="grammar_timeout") from None
        finally:
            if is_well:
                self._rest(trial)
            else:
                trial.kill()
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, trial.close))
        return tried

    async def _living_trial(self) -> TrialProcess | None:
        """An idle process that is alive. Dead ones are dropped, so that this request does not fail."""
        while self._idle:
            trial, ending = self._idle.popitem()
            ending.cancel()
            if trial.is_alive:
                return trial
            await asyncio.get_running_loop().run_in_executor(None, trial.close)
        return None

    def _rest(self, trial: TrialProcess) -> None:
        """Let a process wait for work for a limited time."""
        self._idle[trial] = asyncio.get_running_loop().call_later(self._settings.grammar_idle_s, self._end_idle, trial)

    def _end_idle(self, trial: TrialProcess) -> None:
        """End a process that was idle for a while. The next grammar starts a new one."""
        del self._idle[trial]
        asyncio.get_running_loop().run_in_executor(None, trial.close)

    async def _new_trial(self, ready: _Vocabulary) -> TrialProcess:
        """Start a process. If the caller stops waiting, the next request uses it."""
        starting = asyncio.get_running_loop().run_in_executor(self._threads, TrialProcess, ready.first)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda done: None if done.exception() else self._rest(done.result()))
            raise
        except OSError as error:  # no process, no file left
            message = f"no grammar can be compiled now ({error.strerror}); try again in a moment"
            raise ApiError(503, message, kind="server_error") from None

    def _ready(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    compiler = GrammarCompiler(self._codec)
                except OutriderError as error:
                    raise grammar_refusal(error) from None
                tokenizer = serialised_tokenizer(self._codec)
                first = first_line(tokenizer, compiler.end_ids, max_bytes=self._settings.grammar_bytes)
                self._vocabulary = _Vocabulary(compiler, first)
            return self._vocabulary


def _compiled(compiler: GrammarCompiler, source: GrammarSource) -> Grammar:
    try:
        return compiler.compile(source)
    except OutriderError as error:
        raise grammar_refusal(error) from None


def grammar_refusal(error: OutriderError, param: str = "response_format") -> ApiError:
    """The API error for a grammar that is refused."""
    codes = {GrammarTooLargeError: "grammar_too_large", GrammarTooDeepError: "grammar_too_deep"}
    return ApiError(400, str(error), param=param, code=codes.get(type(error), "invalid_grammar"))
