"""Where a run of tokens ends a request: taken at once where nobody reads the text, token by token where somebody does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider.core.params import SamplingParams
from outrider.core.request import FinishReason, Origin, Request, RequestState
from outrider.engine.finish import emit


class Silent:
    """A detokenizer that never completes a text."""

    def push(self, token: int) -> str:
        del token
        return ""


def state_of(max_tokens: int, new_stream: Callable[[], Silent] | None) -> RequestState:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[7])
    return RequestState.of(Request([1, 2, 3], params, eos_ids=frozenset({0}), new_stream=new_stream))


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_taken_at_once_ends_where_single_tokens_end(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        max_tokens, max_len = chance.randint(1, 9), chance.randint(4, 12)
        both = [state_of(max_tokens, new_stream) for new_stream in (None, Silent)]
        while not both[1].is_finished:
            tokens = [chance.randint(0, 12) for _ in range(chance.randint(1, 4))]
            origins = [chance.choice(list(Origin)) for _ in tokens]
            taken = [emit(state, tokens, origins, max_len=max_len) for state in both]
            assert taken[0] == taken[1]
        first, second = both
        assert (first.tokens, first.origins) == (second.tokens, second.origins)
        assert (first.finish_reason, first.stop_match) == (second.finish_reason, second.stop_match)
        assert first.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert emit(first, [5], [Origin.BONUS], max_len=max_len) == 0
