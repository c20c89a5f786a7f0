"""The prompts of a ``generate`` call: left-padded rows of ids as lists without their padding.

Position ids and the attention mask must follow from the padding. If they say anything else, the call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import RequestError

_USED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Inputs of ``forward`` that ``generate`` prepares for every causal model."""


@final
@dataclass(frozen=True, eq=False)
class PaddedPrompts:
    """The prompts of a batch."""

    input_ids: Tensor
    """[B, P] ids as the caller gave them, padding included."""
    rows: tuple[tuple[int, ...], ...]
    """The ids of each row without its padding."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def padded_len(self) -> int:
        """P. transformers counts lengths with the padding."""
        return self.input_ids.shape[1]

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    @property
    def paddings(self) -> list[int]:
        """Number of padding tokens on the left of each row."""
        return [self.padded_len - len(row) for row in self.rows]

    def padding_of(self, row: int) -> list[int]:
        """The ids on the left that do not belong to the row's text."""
        return self.input_ids[row, : self.padded_len - len(self.rows[row])].tolist()

    @staticmethod
    def of(input_ids: Tensor, inputs: Mapping[str, Any]) -> PaddedPrompts:
        """The prompts of a call. ``inputs`` are the other inputs of the model's ``forward``."""
        _check_inputs(input_ids, inputs)
        mask = inputs.get("attention_mask")
        kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
        _check_mask(input_ids, kept)
        _check_positions(kept, inputs.get("position_ids"))
        rows = tuple(tuple(ids[mine].tolist()) for ids, mine in zip(input_ids, kept))
        return PaddedPrompts(input_ids, rows)


def _check_inputs(input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    unknown = next((name for name, value in inputs.items() if value is not None and name not in _USED), None)
    if unknown is not None:
        raise RequestError(
            f"generate was given {unknown!r}, which speculative decoding cannot pass on to the model; leave it out, or call "
            "generate without custom_generate"
        )
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise RequestError("past_key_values is not supported: speculative decoding keeps its own cache; give the whole prompt")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise RequestError("the prompt has no ids; give input_ids (inputs_embeds alone are not supported)")


def _check_mask(input_ids: Tensor, kept: Tensor) -> None:
    if kept.shape != input_ids.shape:
        raise RequestError(
            f"attention_mask has shape {list(kept.shape)} and input_ids {list(input_ids.shape)}; give one entry per id"
        )
    empty = next((row for row, mine in enumerate(kept) if not bool(mine.any())), None)
    if empty is not None:
        raise RequestError(f"row {empty} of attention_mask hides the whole prompt; leave the row out")
    if bool((kept[:, 1:] < kept[:, :-1]).any()):
        raise RequestError("attention_mask hides ids after visible ones; use tokenizer.padding_side = 'left'")


def _check_positions(kept: Tensor, position_ids: Tensor | None) -> None:
    if position_ids is None:
        return
    usual = (kept.long().cumsum(-1) - 1).clamp(min=0)
    given = position_ids.to(kept.device)
    if given.shape[-1] != usual.shape[-1] or given.dim() != 2 or bool(((given != usual) & kept).any()):
        raise RequestError("position_ids other than 0, 1, 2, ... from the first visible id are not supported; leave them out")
