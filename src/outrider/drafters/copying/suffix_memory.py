"""The memory of suffix decoding: the texts of all requests, finished or running, shared by all drafters that hold it.

It is a lasting memory, with a maximum size in tokens, ``save`` and ``load``. The oldest texts are dropped first. An automaton
cannot forget a single text, so the memory is a queue of a few automata, each with its share of the size. The newest one learns,
and the oldest is dropped whole when a new one is started.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import numpy as np

from outrider.core.errors import ModelError, OptionError
from outrider.drafters.copying.memory_file import read_memory, write_memory
from outrider.drafters.copying.saved_memory import SavedMemory, memory_of
from outrider.drafters.copying.suffix_automaton import SuffixAutomaton, Tail

_KIND = "suffix memory 1"
_NUM_SEGMENTS = 4
LEAD_IN = 16
"""Tokens before a text that are learned with it, so that its first tokens have a context."""
MIN_TOKENS = _NUM_SEGMENTS * 4 * LEAD_IN


@dataclass(eq=False)
class _Segment:
    """One automaton, with its texts for saving."""

    automaton: SuffixAutomaton
    texts: list[array[int]] = field(default_factory=list)


@dataclass(eq=False)
class SharedText:
    """How much of one request the memory has learned."""

    num_shared: int
    """Learned tokens, counted from the start of the prompt. Of prompts, only the last tokens are learned."""
    segment: _Segment | None = None
    tail: Tail = field(default_factory=Tail)
    record: array[int] = field(default_factory=lambda: array("i"))

    def copy(self) -> SharedText:
        """A copy for a second request that continues from here. The memory treats it as another text."""
        return SharedText(self.num_shared)


@final
class SuffixMemory(SavedMemory):
    """Texts of many requests as suffix automata, oldest forgotten first."""

    def __init__(self, *, vocab_size: int, max_tokens: int = 500_000, max_match: int = 64) -> None:
        if max_tokens < MIN_TOKENS:
            raise OptionError(
                f"memory_tokens = {max_tokens} is too few to learn from; use at least {MIN_TOKENS}, or 0 for none"
            )
        super().__init__(vocab_size)
        self.max_tokens = max_tokens
        self.max_match = max_match
        self._capacity = max_tokens // _NUM_SEGMENTS
        self._segments: deque[_Segment] = deque()
        self.clear()

    @property
    def num_tokens(self) -> int:
        """Number of tokens remembered, at most ``max_tokens``."""
        with self.lock:
            return sum(segment.automaton.num_tokens for segment in self._segments)

    @property
    def automata(self) -> Iterator[SuffixAutomaton]:
        """The automata, the newest first. Hold the lock while reading."""
        return (segment.automaton for segment in reversed(self._segments))

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._segments.clear()
            self._segments.append(_Segment(SuffixAutomaton(self.max_match)))

    def share(self, text: SharedText, history: Sequence[int]) -> None:
        """Learn the part of ``history`` that the memory does not have yet."""
        with self.lock:
            while text.num_shared < len(history):
                room = self._room(text, history)
                new = list(history[text.num_shared : text.num_shared + room])
                self._learn(text, new)
                text.num_shared += len(new)

    def save(self, path: str | Path) -> None:
        """Write the remembered texts."""
        with self.lock:
            texts = [text for segment in self._segments for text in segment.texts if text]
            sizes = np.array([len(text) for text in texts], np.int64)
            tokens = np.array([token for text in texts for token in text], np.int32)
        write_memory(path, _KIND, header={"vocab_size": self.vocab_size}, arrays={"tokens": tokens, "sizes": sizes})

    @staticmethod
    def load(path: str | Path, *, vocab_size: int, max_tokens: int = 500_000, max_match: int = 64) -> SuffixMemory:
        """Learn saved texts again in the order they were saved, at some microseconds per token."""
        _, arrays = read_memory(path, _KIND, vocab_size=vocab_size)
        memory = SuffixMemory(vocab_size=vocab_size, max_tokens=max_tokens, max_match=max_match)
        tokens: list[int] = arrays["tokens"].tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ModelError(f"memory file {path} holds tokens outside the vocabulary; delete it and save it again")
        begin = 0
        for size in arrays["sizes"].tolist():
            memory.share(SharedText(0), tokens[begin : begin + size])
            begin += size
        return memory

    @staticmethod
    def of(given: SuffixMemory | str | None, *, vocab_size: int, max_tokens: int, max_match: int) -> SuffixMemory:
        """A memory from a user's option: an existing one, the file of a saved one, or nothing."""
        sizes = {"vocab_size": vocab_size, "max_tokens": max_tokens, "max_match": max_match}
        new, load = partial(SuffixMemory, **sizes), partial(SuffixMemory.load, **sizes)
        return memory_of(given, vocab_size=vocab_size, new=new, load=load)

    def _room(self, text: SharedText, history: Sequence[int]) -> int:
        """Put the text into the newest segment if it is not there. Start a new segment when that one is full."""
        segment = self._segments[-1]
        lead = () if text.segment is segment else history[max(0, text.num_shared - LEAD_IN) : text.num_shared]
        if segment.automaton.num_tokens + len(lead) >= self._capacity:
            segment = _Segment(SuffixAutomaton(self.max_match))
            self._segments.append(segment)
            if len(self._segments) > _NUM_SEGMENTS:
                self._segments.popleft()
            lead = history[max(0, text.num_shared - LEAD_IN) : text.num_shared]
        if text.segment is not segment:
            text.segment, text.tail, text.record = segment, Tail(), array("i")
            segment.texts.append(text.record)
            self._learn(text, list(lead))
        return self._capacity - segment.automaton.num_tokens

    @staticmethod
    def _learn(text: SharedText, tokens: list[int]) -> None:
        assert text.segment is not None
        text.segment.automaton.extend(text.tail, tokens)
        text.record.extend(tokens)
