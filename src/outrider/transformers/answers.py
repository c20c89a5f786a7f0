"""The answer of a ``generate`` call: one padded tensor, the streamer's columns, and scores if requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.core.errors import OptionError
from outrider.core.report import Progress
from outrider.transformers.hf_options import Answer
from outrider.transformers.hf_processors import bound
from outrider.transformers.hf_prompts import PaddedPrompts

_FILLER = 0
"""The padding token, if rows end at different lengths and the model has none."""


@final
class Columns:
    """New tokens of all rows. A streamer gets them column by column, as from plain ``generate``."""

    def __init__(self, prompts: PaddedPrompts, wanted: Answer, streamer: Any = None) -> None:
        self._prompts, self._wanted, self._streamer = prompts, wanted, streamer
        self._rows: list[list[int]] = [[] for _ in prompts.rows]
        self._is_done = [False] * prompts.num_rows
        self._num_shown = 0

    def add(self, step: Progress) -> None:
        """Append what one round gave to one row."""
        self._rows[step.request] += step.new_tokens
        self._is_done[step.request] = step.state.is_finished
        if self._streamer is not None:
            self._show()

    def end(self) -> Tensor:
        """[B, P + L] prompts and new tokens, padded on the right."""
        if self._streamer is not None:
            self._streamer.end()
        longest = max(map(len, self._rows))
        columns = [self._column(place) for place in range(longest)]
        new = torch.tensor(columns, dtype=torch.int64).reshape(longest, self._prompts.num_rows).t()
        return torch.cat((self._prompts.input_ids, new.to(self._prompts.input_ids.device)), 1)

    def _show(self) -> None:
        """Pass on every column that is complete: each row has its token, or has ended."""
        while self._is_complete(self._num_shown):
            self._streamer.put(torch.tensor(self._column(self._num_shown)))
            self._num_shown += 1

    def _is_complete(self, place: int) -> bool:
        reached = [len(row) > place for row in self._rows]
        return any(reached) and all(here or done for here, done in zip(reached, self._is_done))

    def _column(self, place: int) -> list[int]:
        pad = _FILLER if self._wanted.pad_id is None else self._wanted.pad_id
        return [row[place] if place < len(row) else pad for row in self._rows]


@final
class Scorebook:
    """Logits and processed scores of every new token. Rows that have ended hold zeros."""

    def __init__(self, prompts: PaddedPrompts, wanted: Answer, processors: Sequence[Any], vocab_size: int) -> None:
        self._prompts, self._wanted, self._vocab_size = prompts, wanted, vocab_size
        self._processors = [bound(processors, row) for row in range(prompts.num_rows)]
        self._logits: list[list[Tensor]] = [[] for _ in prompts.rows]
        self._scores: list[list[Tensor]] = [[] for _ in prompts.rows]

    def add(self, step: Progress) -> None:
        """Keep the logits of the nodes that one round's tokens follow."""
        if not (self._wanted.scores or self._wanted.logits):
            return
        row, start = step.request, step.report.positions[step.row]
        nodes, path = step.report.seen.scores.logits[step.row], step.report.seen.paths[step.row]
        for count in range(len(step.new_tokens)):
            logits = nodes[path[count], : self._vocab_size].float().to(self._prompts.input_ids.device, copy=True)
            self._logits[row].append(logits)
            if self._wanted.scores:
                self._scores[row].append(self._processed(row, step.state.output_ids[: start + count], logits))

    def logits(self) -> tuple[Tensor, ...] | None:
        """[B, V] logits of each column; None if they were not requested."""
        return self._stacked(self._logits) if self._wanted.logits else None

    def scores(self) -> tuple[Tensor, ...] | None:
        """The ``logits`` after the processors."""
        return self._stacked(self._scores) if self._wanted.scores else None

    def _processed(self, row: int, new_ids: Sequence[int], logits: Tensor) -> Tensor:
        prompt = self._prompts.input_ids[row]
        ids, scores = torch.cat((prompt, prompt.new_tensor(new_ids)))[None], logits[None].clone()
        for processor in self._processors[row]:
            scores = processor(ids, scores)
        return scores[0]

    def _stacked(self, rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        empty = torch.zeros(self._vocab_size, device=self._prompts.input_ids.device)
        longest = max(map(len, rows))
        return tuple(torch.stack([row[place] if place < len(row) else empty for row in rows]) for place in range(longest))


def finished(sequences: Tensor, book: Scorebook, wanted: Answer) -> Any:
    """The answer in the requested form."""
    if not wanted.as_dict:
        return sequences
    return cast("Any", GenerateDecoderOnlyOutput)(sequences=sequences, scores=book.scores(), logits=book.logits())


def check_padding(prompts: PaddedPrompts, wanted: Answer, *, may_end_early: bool) -> None:
    """Refuse a batch whose rows may end at different lengths if no padding token is known."""
    if wanted.pad_id is None and may_end_early and prompts.num_rows > 1:
        raise OptionError("rows of the batch may end at different lengths, and there is no padding token; set pad_token_id")
