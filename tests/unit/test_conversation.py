"""A conversation's own memory: same text as plain decoding, copies of what left the prompt, nothing shared with others."""

from __future__ import annotations

import pytest

from outrider.api import LLM
from outrider.conversation import Conversation
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams

STORY = "Once upon a time there was a small blue boat named Pip. Pip lived in a quiet harbour with an old grey gull."
GREEDY = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="plain")


def test_turns_are_those_of_plain_decoding(llm: LLM) -> None:
    talk = Conversation(llm, files=[STORY])
    messages: list[dict[str, str]] = []
    for turn in ("Tell me a story about a boat.", "Tell it again."):
        messages.append({"role": "user", "content": turn})
        plain = llm.chat(messages, GREEDY, method="plain")[0]
        assert talk.say(turn, GREEDY).token_ids == plain.token_ids
        messages.append({"role": "assistant", "content": plain.text})
    assert talk.messages == messages


def test_what_left_the_prompt_is_still_copied(llm: LLM) -> None:
    """The same question after the first turn was cut away: the answer is guessed from the memory."""
    talk = Conversation(llm, num_draft_tokens=8)
    first = talk.say("Tell me a story about a dog.", GREEDY)
    talk.messages.clear()
    again = talk.say("Tell me a story about a dog.", GREEDY)
    assert again.token_ids == first.token_ids
    assert again.stats.num_passes < 0.5 * first.stats.num_passes


def test_conversations_do_not_learn_of_each_other(llm: LLM) -> None:
    one, other = Conversation(llm), Conversation(llm)
    one.say("Tell me a story.", GREEDY)
    assert one.memory.num_tokens > 40 and other.memory.num_tokens == 0
    one.remember(STORY)
    assert one.memory.num_tokens > 60


def test_a_method_without_memory_is_refused(llm: LLM) -> None:
    with pytest.raises(OptionError, match="'plain' has no suffix memory"):
        Conversation(llm, method="plain")
