"""The asynchronous Python API: the same calls, to be awaited.

    llm = AsyncLLM(method="prompt-lookup")
    outputs = await llm.generate("Once upon a time", SamplingParams(max_tokens=64))
    async for chunk in llm.stream("Once upon a time"):
        print(chunk.text, end="")

Passes run in a thread, so the event loop is free meanwhile. Calls take turns; the prompts of one call share passes. For a
program with many clients at once, ``outrider serve`` is better, because requests of all clients share passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, final

from outrider.api import LLM
from outrider.core.prompts import Message, Prompt
from outrider.outputs import RequestOutput, StreamChunk


@final
class AsyncLLM:
    """An ``LLM`` whose calls are awaited."""

    def __init__(self, model: str | None = None, *, llm: LLM | None = None, **options: Any) -> None:
        """``llm`` is an already loaded ``LLM``. Without it, the arguments are those of ``LLM``, which is loaded here."""
        self.llm = llm or LLM(model, **options)
        self._turn = asyncio.Lock()

    async def generate(self, prompts: Prompt | Sequence[Prompt], params: Any = None, **options: Any) -> list[RequestOutput]:
        """Await what ``LLM.generate`` returns."""
        async with self._turn:
            return await asyncio.to_thread(self.llm.generate, prompts, params, **options)

    async def chat(self, messages: Sequence[Message], params: Any = None, **options: Any) -> list[RequestOutput]:
        """Await what ``LLM.chat`` returns."""
        async with self._turn:
            return await asyncio.to_thread(self.llm.chat, messages, params, **options)

    async def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Any = None, **options: Any
    ) -> AsyncIterator[StreamChunk]:
        """Iterate over the chunks of ``LLM.stream``. Leaving the loop early stops the generation."""
        async with self._turn:
            async for chunk in _awaited(self.llm.stream(prompts, params, **options)):
                yield chunk

    async def stream_chat(self, messages: Sequence[Message], params: Any = None, **options: Any) -> AsyncIterator[StreamChunk]:
        """Iterate over the chunks of ``LLM.stream_chat``."""
        async with self._turn:
            async for chunk in _awaited(self.llm.stream_chat(messages, params, **options)):
                yield chunk


async def _awaited(chunks: Iterator[StreamChunk]) -> AsyncIterator[StreamChunk]:
    """Iterates over a blocking iterator, each step in a thread."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
