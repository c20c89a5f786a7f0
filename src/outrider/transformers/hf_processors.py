"""Logits processors of transformers on the nodes of a tree.

A processor is called with one row: the ids on the path to a node, after the row's padding, and that node's logits. Its result
must depend only on those two. This is tested on the prompts before the first token, and a processor that fails is refused by
name.

Where sampled text has to be that of plain ``generate``, all processors run per node, and ``hf_noise.py`` makes their result
scores whose largest is the drawn token. With the engine's own noise, the last processors of the list mostly become sampling
parameters, which are computed for all nodes at once. These are temperature, top-k, top-p, min-p and typical-p, in this order. A
repetition penalty that stands alone before them does, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from outrider.core.errors import OptionError
from outrider.core.params import LogitsProcessor
from outrider.transformers.hf_noise import TorchNoise
from outrider.transformers.hf_options import name_of
from outrider.transformers.hf_prompts import PaddedPrompts

_NATIVE: tuple[tuple[type, str, str], ...] = (
    (theirs.TemperatureLogitsWarper, "temperature", "temperature"),
    (theirs.TopKLogitsWarper, "top_k", "top_k"),
    (theirs.TopPLogitsWarper, "top_p", "top_p"),
    (theirs.MinPLogitsWarper, "min_p", "min_p"),
    (theirs.TypicalLogitsWarper, "typical_p", "mass"),
)
"""Class in transformers, sampling parameter, attribute of the class, in the order in which both programs apply them."""
_STATEFUL = (theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor, theirs.SynthIDTextWatermarkLogitsProcessor)
"""Classes that remember earlier calls. A rejected guess would spoil that memory."""
_TOLERANCE = 1e-4
_REMEDY = "leave it out, or call generate without custom_generate"


@final
@dataclass(frozen=True, eq=False)
class Processing:
    """How the logits of a call become a distribution."""

    processors: tuple[Any, ...]
    """Processors that are called for every node, in this order, before the sampling parameters apply."""
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that replace the other processors."""
    noise: TorchNoise | None = None
    """Makes the token that ``torch.multinomial`` draws the one with the largest score; None in greedy calls, and with the
    engine's own noise."""

    def row(self, prompts: PaddedPrompts, row: int) -> tuple[LogitsProcessor, ...]:
        """The processors as the engine calls them for one row."""
        called: list[LogitsProcessor] = []
        if self.processors:
            called.append(_RowProcessor(bound(self.processors, row), prompts.padding_of(row), prompts.input_ids.device))
        if self.noise is not None:
            called.append(_RowNoise(self.noise, row, len(prompts.rows[row]), prompts.input_ids.device))
        return tuple(called)


def processing_of(
    processors: Sequence[Any], prompts: PaddedPrompts, *, do_sample: bool, noise: TorchNoise | None = None
) -> Processing:
    """The prepared processors of a call. With ``noise`` all of them are called, and the largest score is chosen. Without it,
    those with an equal sampling parameter are replaced by that parameter."""
    kept = list(processors)
    if noise is not None:
        return Processing(tuple(kept), {"temperature": 0.0}, noise)
    if kept and type(kept[-1]) is theirs.LogitNormalization:  # it adds a constant at each node, so the law is the same
        kept.pop()
    params: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    if do_sample:
        kept, tail = _split_tail(kept)
        params |= tail
    if len(kept) == 1 and _is_usual_penalty(kept[0], prompts):
        return Processing((), {**params, "repetition_penalty": float(kept[0].penalty)})
    return Processing(tuple(kept), params)


def bound(processors: Sequence[Any], row: int) -> list[Any]:
    """The processors for one row alone. Some hold one value per row of the batch."""
    return [_bound(one, row) for one in processors]


def try_processors(processors: Sequence[Any], prompts: PaddedPrompts, vocab_size: int) -> None:
    """Refuse a processor that remembers its calls or looks at other rows. For this it is called on the prompts, with made-up
    scores."""
    noise = torch.Generator().manual_seed(0)
    scores = torch.randn(prompts.num_rows, vocab_size, generator=noise).to(prompts.input_ids.device)
    for processor in processors:
        name = name_of(processor)
        if isinstance(processor, _STATEFUL):
            raise OptionError(f"{name} remembers earlier calls, which rejected guesses would spoil; {_REMEDY}")
        whole = processor(prompts.input_ids, scores.clone())
        if not _same(whole, processor(prompts.input_ids, scores.clone())):
            raise OptionError(
                f"{name} gives different results for the same input, so guesses cannot be checked with it; {_REMEDY}"
            )
        try:
            parts = [_apply_row(processor, prompts, scores, row) for row in range(prompts.num_rows)]
        except Exception as error:  # a processor may raise anything where it misses the other rows
            reason = f"{type(error).__name__}: {error}"
            raise OptionError(f"{name} cannot be applied to one row of the batch ({reason}); {_REMEDY}") from error
        if not _same(whole, torch.cat(parts)):
            raise OptionError(f"{name} looks at other rows of the batch; call generate with one prompt at a time")


@final
@dataclass(frozen=True, eq=False)
class _RowProcessor:
    """All processors of one row, with the engine's interface."""

    processors: list[Any]
    padding: list[int]
    device: torch.device

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([[*self.padding, *tokens]], device=self.device)
        scores = logits[None].to(self.device, copy=True)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores[0].to(logits.device)


@final
@dataclass(frozen=True, eq=False)
class _RowNoise:
    """The random draw of one row, after its processors."""

    noise: TorchNoise
    row: int
    prompt_len: int
    device: torch.device

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        return self.noise.scores(logits.to(self.device), len(tokens) - self.prompt_len, self.row).to(logits.device)


def _split_tail(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The processors before the longest suffix that sampling parameters can replace, and those parameters."""
    params: dict[str, Any] = {}
    kept, place = list(processors), len(_NATIVE)
    while kept:
        found = next((i for i, (kind, *_) in enumerate(_NATIVE[:place]) if type(kept[-1]) is kind), None)
        if found is None or not _is_plain(kept[-1]):
            break
        _, name, attribute = _NATIVE[found]
        params[name], place = vars(kept.pop())[attribute], found
    return kept, params


def _is_plain(processor: Any) -> bool:
    """Whether a truncation removes tokens altogether, and may leave a single one."""
    held = vars(processor)
    return held.get("filter_value", -torch.inf) == -torch.inf and held.get("min_tokens_to_keep", 1) == 1


def _is_usual_penalty(processor: Any, prompts: PaddedPrompts) -> bool:
    """Whether a repetition penalty covers exactly the tokens of the text."""
    if type(processor) is not theirs.RepetitionPenaltyLogitsProcessor:
        return False
    ignored = processor.prompt_ignore_length
    paddings = prompts.paddings
    return not any(paddings) if ignored is None else isinstance(ignored, Tensor) and ignored.tolist() == paddings


def _bound(processor: Any, row: int) -> Any:
    if isinstance(processor, theirs.RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
        mine = copy.copy(processor)
        mine.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return mine
    if isinstance(processor, theirs.PrefixConstrainedLogitsProcessor):
        return theirs.PrefixConstrainedLogitsProcessor(_of_row(processor._prefix_allowed_tokens_fn, row), 1)
    return processor


def _of_row(allowed: Callable[[int, Tensor], list[int]], row: int) -> Callable[[int, Tensor], list[int]]:
    return lambda _, ids: allowed(row, ids)


def _apply_row(processor: Any, prompts: PaddedPrompts, scores: Tensor, row: int) -> Tensor:
    return _bound(processor, row)(prompts.input_ids[row : row + 1], scores[row : row + 1].clone())


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
