"""The sampling parameters of a frame's slots as tensors, so that one captured round serves every request.

A ``Shaping`` holds what turns a model's logits into the law of a slot, beside its temperature. It covers bias, banned and
forced tokens, a minimum length, penalties and the counts they need, and truncations. The value ``Stages`` says how much of it a
captured round computes. A round computes what the most demanding request in its slots needs; the others are not changed by it.
What cannot be a tensor (processors) is left to the host. A grammar's masks come from the host while the pass runs
(``engine/constrained.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.sampling import bias_of

_MOST_ENDS = 16
"""Most tokens that can end the text of a slot with a minimum length."""
MOST_LOGPROBS = 20
"""Most alternatives whose log-probabilities a captured round reports."""
IN_PROMPT = 1 << 30
"""Added to the count of a token that occurs in the prompt."""


Sent = Callable[[Any, torch.dtype, torch.device], Tensor]
"""Converts values to a tensor on the device, without waiting for the device (``models/gpu/uploads.py``)."""


class Stages(IntEnum):
    """How much of the sampler a round computes. Each stage includes those before it."""

    TEMPERATURE = 0
    TOP_P = 1
    """Bias, minimum length, penalties, min-p and top-p."""
    TOP_K = 2
    TYPICAL = 3


class Use(IntFlag):
    """The steps of the sampler that a slot uses."""

    BIAS = 1
    MIN_TOKENS = 2
    PENALTIES = 4
    TOP_K = 8
    TOP_P = 16
    MIN_P = 32
    TYPICAL = 64
    GRAMMAR = 128
    """A mask of forbidden tokens at every node. The host uploads it during the pass."""


def use_of(params: SamplingParams) -> Use:
    """The sampler steps that these parameters need. Greedy sampling needs no truncation."""
    draws = params.temperature > 0
    asked = (
        (Use.BIAS, bool(params.logit_bias or params.banned_token_ids)),
        (Use.MIN_TOKENS, params.min_tokens > 0),
        (Use.PENALTIES, params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0),
        (Use.TOP_K, draws and params.top_k > 0),
        (Use.TOP_P, draws and params.top_p < 1),
        (Use.MIN_P, draws and params.min_p > 0),
        (Use.TYPICAL, draws and params.typical_p < 1),
        (Use.GRAMMAR, params.grammar is not None),
    )
    return Use(sum(use.value for use, is_asked in asked if is_asked))


def stages_for(requests: Sequence[Request]) -> Stages | None:
    """The stages that these requests need; None where one of them needs the host."""
    for request in requests:
        params = request.params
        needs_host = bool(params.logits_processors) or (params.logprobs or 0) > MOST_LOGPROBS
        if needs_host or (params.min_tokens and len(request.end_ids) > _MOST_ENDS):
            return None
    return max((_stages_of(use_of(request.params)) for request in requests), default=Stages.TEMPERATURE)


def _stages_of(use: Use) -> Stages:
    if use & Use.TYPICAL:
        return Stages.TYPICAL
    if use & Use.TOP_K:
        return Stages.TOP_K
    return Stages.TOP_P if use else Stages.TEMPERATURE


@dataclass(frozen=True, eq=False)
class Shaping:
    """Sampling parameters of B slots, in tensors with fixed addresses."""

    uses: Tensor
    """[B] int32 bits of ``Use``."""
    top_k: Tensor
    """[B] int64."""
    top_p: Tensor
    """[B] float64."""
    log_min_p: Tensor
    """[B] float32."""
    typical_p: Tensor
    """[B] float64."""
    penalties: Tensor
    """[3, B] float32: repetition, presence, frequency."""
    min_tokens: Tensor
    """[B] int64."""
    ends: Tensor
    """[B, 16] int64 tokens that end a text, -1 for none."""
    bias: Tensor
    """[B, V] float32, added to the logits."""
    counts: Tensor
    """[B, V] int32 occurrences in the output, plus ``IN_PROMPT`` for tokens of the prompt."""

    @staticmethod
    def empty(batch_size: int, vocab_size: int, device: torch.device) -> Shaping:
        """Slots that sample from the raw logits."""

        def column(*shape: int, dtype: torch.dtype, value: float = 0) -> Tensor:
            return torch.full((*shape,), value, dtype=dtype, device=device)

        return Shaping(
            uses=column(batch_size, dtype=torch.int32),
            top_k=column(batch_size, dtype=torch.int64),
            top_p=column(batch_size, dtype=torch.float64, value=1.0),
            log_min_p=column(batch_size, dtype=torch.float32),
            typical_p=column(batch_size, dtype=torch.float64, value=1.0),
            penalties=column(3, batch_size, dtype=torch.float32),
            min_tokens=column(batch_size, dtype=torch.int64),
            ends=column(batch_size, _MOST_ENDS, dtype=torch.int64, value=-1),
            bias=column(batch_size, vocab_size, dtype=torch.float32),
            counts=column(batch_size, vocab_size, dtype=torch.int32),
        )

    def seat(self, slots: Sequence[int], states: Sequence[RequestState], sent: Sent) -> None:
        """Fill in the parameters of these slots. Slots that use no step only have their ``uses`` cleared."""
        self.uses.index_fill_(0, sent(list(slots), torch.int64, self.uses.device), 0)
        others = [(slot, state) for slot, state in zip(slots, states, strict=True) if use_of(state.params)]
        if others:
            self._seat_columns([slot for slot, _ in others], [state for _, state in others], sent)
        for slot, state in others:
            self._seat_tables(slot, state, sent)

    def _seat_columns(self, slots: Sequence[int], states: Sequence[RequestState], sent: Sent) -> None:
        params, device = [state.params for state in states], self.uses.device
        index = sent(slots, torch.int64, device)
        min_p = torch.tensor([max(p.min_p, 1e-30) for p in params], dtype=torch.float32).log()
        for column, values in (
            (self.uses, [int(use_of(p)) for p in params]),
            (self.top_k, [min(p.top_k or self.bias.shape[1], self.bias.shape[1]) for p in params]),
            (self.top_p, [p.top_p for p in params]),
            (self.log_min_p, min_p.tolist()),
            (self.typical_p, [p.typical_p for p in params]),
            (self.min_tokens, [p.min_tokens for p in params]),
            (self.ends, [_ends(state) for state in states]),
        ):
            column[index] = sent(values, column.dtype, device)
        rates = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        self.penalties[:, index] = sent(rates, torch.float32, device).T

    def _seat_tables(self, slot: int, state: RequestState, sent: Sent) -> None:
        """Fill in the bias and the token counts of one slot, if it uses them."""
        use, device = use_of(state.params), self.bias.device
        if use & Use.BIAS:
            self.bias[slot] = sent(bias_of(state.params, self.bias.shape[1]), torch.float32, device)
        if use & Use.PENALTIES:
            num_prompt = len(state.request.prompt_ids)
            self.counts[slot] = 0
            output = sent(state.tokens[num_prompt:], torch.int64, device)
            self.counts[slot].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            self.counts[slot, sent(sorted(set(state.request.prompt_ids)), torch.int64, device)] += IN_PROMPT


def _ends(state: RequestState) -> list[int]:
    ends = sorted(state.request.end_ids) if state.params.min_tokens else []
    return [*ends, *[-1] * (_MOST_ENDS - len(ends))]
