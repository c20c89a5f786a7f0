"""Prompt lookup: the text often says again what it said before, so copy what followed last time.

The last n tokens are looked up in the request's own history, longest n first, most recent occurrence first, and what followed
is proposed as a chain. A match close to the end continues into the guesses themselves, so a repeating pattern is drafted to
full length. A guess costs one dictionary look-up and needs no weights. (Saxena 2023, "Prompt Lookup Decoding".)

Guesses are copied, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TreeRow
from outrider.drafters.copying.copier import Copier
from outrider.drafters.per_row import PerRow


@dataclass(frozen=True)
class PromptLookupOptions:
    """How much must match before a continuation is copied."""

    max_ngram: int = 4
    """Longest match looked for, in tokens."""
    min_ngram: int = 1
    """Shortest match that is trusted."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(
                f"min_ngram = {self.min_ngram} and max_ngram = {self.max_ngram} are not valid together; "
                "use 1 <= min_ngram <= max_ngram"
            )


class NgramIndex:
    """Where each n-gram of a growing history last ended, if a token follows. O(max_ngram) per new token."""

    def __init__(self, options: PromptLookupOptions) -> None:
        self.options = options
        self.next_start: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0

    def extend(self, history: Sequence[int]) -> None:
        """Index every n-gram that already has a token after it."""
        sizes = range(self.options.min_ngram, self.options.max_ngram + 1)
        for end in range(max(self.num_indexed, 1), len(history)):
            for size in sizes:
                if size > end:
                    break
                self.next_start[tuple(history[end - size : end])] = end
        self.num_indexed = len(history)

    def continuation(self, history: Sequence[int], length: int) -> list[int]:
        """Up to ``length`` tokens that followed the longest, most recent earlier match; empty without one."""
        for size in range(min(self.options.max_ngram, len(history) - 1), self.options.min_ngram - 1, -1):
            start = self.next_start.get(tuple(history[-size:]))
            if start is not None:
                copied = list(history[start : start + length])
                while len(copied) < length:  # the source reaches the present: go on copying from the guesses
                    copied.append(copied[start + len(copied) - len(history)])
                return copied
        return []

    def copy(self) -> NgramIndex:
        twin = NgramIndex(self.options)
        twin.next_start = dict(self.next_start)
        twin.num_indexed = self.num_indexed
        return twin


@final
class PromptLookup(Copier):
    """Chains copied from the request's own tokens."""

    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: PromptLookupOptions | None = None) -> None:
        self.options = options or PromptLookupOptions()

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter:
        from outrider.device.drafters.copying.prompt_lookup import DeviceLookup  # needs triton

        del shape, target
        return DeviceLookup(min_ngram=self.options.min_ngram, max_ngram=self.options.max_ngram)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> PerRow[NgramIndex]:
        del taps
        return PerRow([NgramIndex(self.options) for _ in rows])

    def copied(self, state: PerRow[NgramIndex], texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        rows: list[TreeRow] = []
        limits = map(min, plan.max_depth, plan.max_nodes)
        for index, history, length in zip(state.rows, texts, limits, strict=True):
            index.extend(history)
            chain = [history[-1], *(index.continuation(history, length) if length else [])]
            rows.append((chain, list(range(-1, len(chain) - 1))))
        return rows


def build(parts: Parts) -> Drafter:
    return PromptLookup(parts.options)


ROW = MethodRow(
    summary="copies what followed the same words earlier in the text",
    paper="Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding)",
    drafter=PromptLookup,
    build=build,
    options=PromptLookupOptions,
    defaults={"num_draft_tokens": 8},
)
