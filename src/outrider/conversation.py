"""A conversation with its own memory: drafts are copied from all of its turns and files, which no other conversation can use.

An agent reads a file, edits it, reads it again, and calls tools whose output comes back in the next answer. Its context is cut
now and then, but the texts come back. So a conversation keeps a suffix memory of all its turns and files, whether or not they
are still in the prompt. Drafts are copied from there. A memory decides only what is guessed, never what is said.

    talk = Conversation(llm, files=[Path("shop.py").read_text()])
    talk.say("Rename the function price to cost in shop.py.").text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from outrider.api import LLM
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.core.prompts import Message
from outrider.drafters.copying.suffix_memory import SharedText, SuffixMemory
from outrider.methods import rows_of
from outrider.outputs import RequestOutput


@final
class Conversation:
    """The turns of one conversation, with their memory."""

    def __init__(self, llm: LLM, *, files: Sequence[str] = (), method: str = "suffix", **options: Any) -> None:
        """``method`` is `suffix`, or one that has it as a part (`hybrid`); ``options`` are the method's."""
        if not any(row.options.__name__ == "SuffixOptions" for row in rows_of(method, options).values()):
            raise OptionError(f"method {method!r} has no suffix memory; use 'suffix', or 'hybrid' with suffix as a part")
        self.llm = llm
        self.memory = SuffixMemory(vocab_size=llm.target.vocab_size)
        """Tokens of this conversation alone."""
        self.messages: list[Message] = []
        """Messages of the next prompt. Cut them as you like: the memory keeps what was in them."""
        self.method = llm.compose(method, memory=self.memory, **options)
        """The method that generates the answers. It reads and writes the memory."""
        for text in files:
            self.remember(text)

    def remember(self, text: str) -> None:
        """Learn a text that may come back: a file, the output of a tool, a turn that was cut from the prompt."""
        self.memory.share(SharedText(0), self.llm.codec.encode(text, add_special_tokens=False))

    def say(self, content: str, params: SamplingParams | None = None, *, role: str = "user") -> RequestOutput:
        """Add a turn, and answer it. Both are part of the conversation afterwards."""
        self.remember(content)
        self.messages.append({"role": role, "content": content})
        output = self.llm.chat(self.messages, params, method=self.method)[0]
        self.messages.append({"role": "assistant", "content": output.text})
        return output
