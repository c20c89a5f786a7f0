"""Finds the important tokens of a prompt: those that the end of the prompt attends to in a small model, in whole chunks.

A token's importance is the attention that the last tokens of the prompt give it, the mean over those tokens, heads and layers
(after speculative prefill, Liu et al. 2025, arXiv 2502.02789). A peak raises its neighbours, because names and numbers have
several tokens. Chunks are kept whole, those with the highest mean first, and always the last one.

    a(j) = mean over layers, heads and last tokens i of softmax_j(q_i k_j),     b(j) = max of a over |j' - j| <= reach
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OptionError, RequestError
from outrider.core.interfaces import Target
from outrider.models.decoder import Decoder


@final
@dataclass(frozen=True)
class PromptShare:
    """How much of a prompt is kept, and how it is chosen."""

    keep: float
    """Share of the prompt's tokens to keep, above 0 and up to 1, rounded up to whole chunks."""
    chunk_len: int = 16
    num_last: int = 16
    """Number of last prompt tokens whose attention counts."""
    reach: int = 4
    """Neighbours on each side that share a peak's importance."""

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not 0 < self.keep <= 1:
            raise OptionError(f"keep_prompt = {self.keep!r} is not valid; use a share above 0 and up to 1 (1 reads all)")
        if self.chunk_len < 1 or self.num_last < 1 or self.reach < 0:
            raise OptionError(f"{self} is not valid; use at least 1 for chunk_len and num_last, and at least 0 for reach")

    def positions(self, importance: Tensor) -> list[int]:
        """Positions to keep, in order, given the importance [S] of each. Chunks are counted from the end."""
        length, size = len(importance), self.chunk_len
        num_chunks = -(-length // size)
        lifted = F.max_pool1d(importance[None].double(), 2 * self.reach + 1, stride=1, padding=self.reach)[0].cpu()
        ends = [length - size * chunk for chunk in range(num_chunks)]
        value = [math.inf, *(float(lifted[max(0, end - size) : end].mean()) for end in ends[1:])]
        best = sorted(range(num_chunks), key=lambda chunk: (-value[chunk], chunk))[: math.ceil(self.keep * num_chunks)]
        return sorted(place for chunk in best for place in range(max(0, ends[chunk] - size), ends[chunk]))


@final
@dataclass(frozen=True, eq=False)
class ImportantTokens:
    """Chooses the tokens of a prompt that a small model finds important."""

    reader: Decoder
    """The small model. It has the target's vocabulary."""
    share: PromptShare

    @staticmethod
    def of(reader: Target, share: PromptShare) -> ImportantTokens:
        """Use a loaded model, whose attention must be readable."""
        if isinstance(reader, Decoder):
            return ImportantTokens(reader, share)
        what = f"keep_prompt needs a small model of the lean decoder to choose among tokens, not {type(reader).__name__}"
        raise OptionError(f"{what}; give a draft= of another family (docs/families.md), or leave keep_prompt out")

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """Positions to read, in order. A prompt of one chunk is read in full."""
        if self.share.keep == 1 or len(prompt) <= self.share.chunk_len:
            return list(range(len(prompt)))
        return self.share.positions(attention_received(self.reader, prompt, self.share.num_last))


@torch.inference_mode()
def attention_received(model: Decoder, tokens: Sequence[int], num_last: int) -> Tensor:
    """[S] float32 attention that each token gets from the last ``num_last``, the mean over them, heads and layers."""
    if len(tokens) > model.max_len:
        what = f"the prompt has {len(tokens)} tokens, and the small model that chooses among them reads {model.max_len} at most"
        raise RequestError(f"{what}; shorten the prompt, give a draft model with a longer context, or leave keep_prompt out")
    begin, cache = max(0, len(tokens) - num_last), model.new_cache(1)
    model.prefill([tokens[:begin]], cache)
    layers = range(model.num_layers)
    states = model.prefill([tokens[begin:]], cache, taps=layers)
    shares = [_shares(model.queries(i, states[i][0], begin), cache.entries(i)[0][0], model.config.query_scale) for i in layers]
    return torch.stack(shares).mean(0)


def _shares(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[S] mean attention of the last N tokens' queries [Hq, N, D] over the keys [Hkv, S, D]."""
    num_last, length = queries.shape[1], keys.shape[1]
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    scores = queries.float() @ keys.float().transpose(1, 2) * scale
    later = torch.ones(num_last, length, dtype=torch.bool, device=keys.device).triu(length - num_last + 1)
    return scores.masked_fill(later, -math.inf).softmax(-1).mean((0, 1))
