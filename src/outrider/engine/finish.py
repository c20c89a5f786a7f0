"""Gives a request the tokens of a round, and decides when they end it. Accepted runs are taken token by token, so they are cut
exactly where plain decoding would stop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.draft import Draft, Draws
from outrider.core.errors import GrammarError
from outrider.core.interfaces import Observation
from outrider.core.report import RoundReport
from outrider.core.request import FinishReason, Origin, RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree


def report_apart(
    ids: Sequence[int], states: Sequence[RequestState], known: Sequence[int], *, seconds: float = 0.0
) -> RoundReport:
    """The report of requests that did not share a round: each ran alone, or failed. It covers their tokens beyond the first
    ``known`` ones. Guesses are counted only in their statistics."""
    rows = len(ids)
    draft = Draft(TokenTree.chain(torch.zeros(rows, 1, dtype=torch.int64)), Draws.DETERMINISTIC)
    seen = Observation(draft, Scores(torch.zeros(0)), [[0]] * rows, [0] * rows, 0.0, 0.0)
    emitted = [state.output_ids[count:] for state, count in zip(states, known, strict=True)]
    return RoundReport(ids, states, known, seen, [0] * rows, [False] * rows, emitted, seconds)


def take(state: RequestState, run: list[int], num_accepted: int, *, rejected: bool, max_len: int) -> list[int]:
    """Give a request the tokens of a round, of which the first ``num_accepted`` were guessed. Returns the tokens it took."""
    guessed, last = run[:num_accepted], Origin.RECOVERED if rejected else Origin.BONUS
    origins = [*[Origin.ACCEPTED] * len(guessed), *[last] * (len(run) - len(guessed))]
    return run[: emit(state, run, origins, max_len=max_len)]


def emit(state: RequestState, tokens: Sequence[int], origins: Sequence[Origin], *, max_len: int) -> int:
    """Append a run of tokens to a request until one of them ends it; returns how many were taken.

    A failure of the request's own grammar or detokenizer ends this request and no other one."""
    if state.is_finished:  # it failed earlier in this round
        return 0
    if state.stream is None and state.params.grammar is None:
        return _emit_whole_run(state, tokens, origins, max_len)
    for taken, (token, origin) in enumerate(zip(tokens, origins, strict=True), 1):
        old_size = len(state.text)
        try:
            _append(state, token, origin)
        except Exception as error:
            state.fail(error)
            return taken
        if _ends(state, token, old_size, max_len):
            return taken
    return len(tokens)


def _emit_whole_run(state: RequestState, tokens: Sequence[int], origins: Sequence[Origin], max_len: int) -> int:
    """Append a run at once, for a request whose text nobody reads. None of its tokens can fail."""
    request = state.request
    room = min(len(request.prompt_ids) + request.params.max_tokens, max_len) - len(state.tokens)
    taken = 0
    if not request.end_ids.isdisjoint(tokens):
        taken = next((place for place, token in enumerate(tokens[:room], 1) if token in request.end_ids), 0)
    if taken:
        state.finish_reason, state.stop_match = FinishReason.STOP, tokens[taken - 1]
    elif room <= len(tokens):
        state.finish_reason = FinishReason.LENGTH
    taken = taken or min(room, len(tokens))
    state.tokens += tokens[:taken]
    state.origins += origins[:taken]
    return taken


def _append(state: RequestState, token: int, origin: Origin) -> None:
    state.tokens.append(token)
    state.origins.append(origin)
    if state.params.grammar is not None:
        state.grammar_state = state.params.grammar.advance(state.grammar_state, token)
        if state.grammar_state is None:
            raise GrammarError(
                f"the grammar allows no token after {state.num_output - 1} tokens of the answer; make the schema or grammar "
                "simpler, or drop min_tokens and the bans that leave no token"
            )
    if state.stream is not None and token not in state.request.end_ids:
        state.text += state.stream.push(token)


def _ends(state: RequestState, token: int, old_size: int, max_len: int) -> bool:
    params = state.params
    if token in state.request.end_ids:
        state.finish_reason, state.stop_match = FinishReason.STOP, token
    elif params.stop and state.num_output >= params.min_tokens and _cut_at_stop(state, old_size):
        state.finish_reason = FinishReason.STOP
    elif state.num_output >= params.max_tokens or len(state.tokens) >= max_len:
        state.finish_reason = FinishReason.LENGTH
    return state.is_finished


def _cut_at_stop(state: RequestState, old_size: int) -> bool:
    """Find the earliest stop string that the newest token completed, and cut the text there."""
    hits: list[tuple[int, str]] = []
    for stop in state.params.stop:
        begin = state.text.find(stop, max(0, old_size - len(stop) + 1))
        if begin >= 0:
            hits.append((begin, stop))
    if not hits:
        return False
    begin, stop = min(hits)
    state.text = state.text[: begin + len(stop) if state.params.include_stop_str_in_output else begin]
    state.stop_match = stop
    return True
