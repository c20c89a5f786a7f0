"""Stopping criteria of transformers, asked after every token of every row.

The maximum length and the end-of-sequence tokens are limits that the engine knows. Every other criterion is called with the ids
of one row, the padding included, after each token, so an accepted run is cut where plain decoding would stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as theirs

from outrider.core.errors import OptionError
from outrider.transformers.hf_options import name_of
from outrider.transformers.hf_prompts import PaddedPrompts

STOP = "\N{END OF TRANSMISSION}"
"""The stop string that is written when a row's criteria are met."""
_KNOWN = (theirs.MaxTimeCriteria, theirs.StopStringCriteria)
"""Criteria that judge every row on its own."""
_REMEDY = "leave it out, or call generate without custom_generate"


@final
@dataclass(frozen=True, eq=False)
class Stopping:
    """When the rows of a call end."""

    max_tokens: int
    """Most new tokens of a row."""
    end_ids: frozenset[int]
    """End-of-sequence tokens."""
    criteria: tuple[Any, ...]
    """Criteria that are asked after each token."""

    @property
    def strings(self) -> tuple[str, ...]:
        """Stop strings of the engine's requests."""
        return (STOP,) if self.criteria else ()

    def new_stream(self, prompts: PaddedPrompts, row: int) -> Callable[[], StopWatch] | None:
        """Makes the text stream that watches one row; None if there are no criteria."""
        if not self.criteria:
            return None
        return partial(StopWatch, self.criteria, prompts.input_ids[row].tolist(), prompts.input_ids.device)


@final
class StopWatch:
    """Asks the criteria of one row. It is the row's text stream, and writes the stop string when one of them is met."""

    def __init__(self, criteria: Sequence[Any], ids: Sequence[int], device: torch.device) -> None:
        self._criteria, self._ids, self._device = criteria, list(ids), device

    def push(self, token: int) -> str:
        self._ids.append(token)
        ids = torch.tensor([self._ids], device=self._device)
        return STOP if any(_is_met(one, ids) for one in self._criteria) else ""


def stopping_of(criteria: Sequence[Any], prompts: PaddedPrompts) -> Stopping:
    """The prepared criteria of a call."""
    lengths = [one.max_length for one in criteria if isinstance(one, theirs.MaxLengthCriteria)]
    ends = [one.eos_token_id.reshape(-1).tolist() for one in criteria if isinstance(one, theirs.EosTokenCriteria)]
    others = [one for one in criteria if not isinstance(one, theirs.MaxLengthCriteria | theirs.EosTokenCriteria)]
    if not lengths:
        raise OptionError("generate has no maximum length; give max_new_tokens")
    if others and not ends and prompts.num_rows > 1:
        name = name_of(others[0])
        raise OptionError(
            f"{name} on a batch needs an end-of-sequence token: without one transformers goes on with rows that have ended; "
            "set eos_token_id and pad_token_id, or give one prompt at a time"
        )
    end_ids = frozenset(int(token) for group in ends for token in group)
    return Stopping(min(lengths) - prompts.padded_len, end_ids, tuple(others))


def try_criteria(criteria: Sequence[Any], prompts: PaddedPrompts) -> None:
    """Refuse a criterion that remembers its calls or looks at other rows. For this it is asked about the prompts."""
    for criterion in criteria:
        name = name_of(criterion)
        if isinstance(criterion, theirs.ConfidenceCriteria):
            raise OptionError(f"{name} belongs to transformers' own speculative decoding; {_REMEDY}")
        if isinstance(criterion, _KNOWN):
            continue
        first, second = (_answers(criterion, prompts.input_ids) for _ in range(2))
        if first != second:
            raise OptionError(f"{name} gives different results for the same input, so it cannot be asked row by row; {_REMEDY}")
        if first != [_is_met(criterion, ids[None]) for ids in prompts.input_ids]:
            raise OptionError(f"{name} looks at other rows of the batch; call generate with one prompt at a time")


def _answers(criterion: Any, ids: Tensor) -> list[bool]:
    found = criterion(ids, None)
    return torch.as_tensor(found).reshape(-1).bool().expand(len(ids)).tolist()


def _is_met(criterion: Any, ids: Tensor) -> bool:
    return _answers(criterion, ids)[0]
