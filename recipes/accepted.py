"""The worth of a drafter on held-out prompts: tokens and accepted guesses per target pass, with the engine itself, greedy. It
also says how sure a difference between two drafters is, by resampling the prompts, the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.api import LLM
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.models.heads import PackedTexts
from outrider.train.draft_lm import DraftLM


def held_prompts(folder: Path, kind: str, count: int) -> list[list[int]]:
    """Beginnings of held-out texts: 24 tokens of a story, a conversation up to its first answer."""
    tokens, starts = np.load(folder / f"held_{kind}.npy"), np.load(folder / f"held_{kind}_starts.npy")
    return [prompt_of(tokens[start : start + 400].tolist(), chat=kind == "chat") for start in starts[:count]]


def prompt_of(window: list[int], *, chat: bool) -> list[int]:
    """What of a text is given."""
    return window[: window.index(2) + 2 if chat and 2 in window[:300] else 24]


@dataclass(frozen=True, eq=False)
class Counts:
    """What every prompt took, [N] each."""

    tokens: NDArray[np.float64]
    accepted: NDArray[np.float64]
    passes: NDArray[np.float64]
    texts: list[list[int]]

    @staticmethod
    def from_rows(rows: Sequence[tuple[int, int, int]], texts: list[list[int]]) -> Counts:
        """Counts from (tokens, accepted guesses, passes) of every prompt."""
        tokens, accepted, passes = np.array(rows, dtype=np.float64).T
        return Counts(tokens, accepted, passes, texts)

    @property
    def per_pass(self) -> float:
        return float(self.tokens.sum() / self.passes.sum())

    @property
    def guesses(self) -> float:
        """Accepted ones per pass."""
        return float(self.accepted.sum() / self.passes.sum())

    def of(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> Counts:
        """Counts of some prompts."""
        return Counts(self.tokens[rows], self.accepted[rows], self.passes[rows], [])

    def gain(self, other: Counts, *, guesses: bool) -> tuple[float, float]:
        """By which share this is more than the other's, and the standard error of that over prompts."""
        rate = (lambda counts: counts.guesses) if guesses else (lambda counts: counts.per_pass)
        random, size = np.random.default_rng(0), len(self.tokens)
        drawn = [random.integers(size, size=size) for _ in range(1000)]
        shares = [rate(self.of(rows)) / max(rate(other.of(rows)), 1e-9) for rows in drawn]
        return rate(self) / max(rate(other), 1e-9) - 1, float(np.std(shares))


def new_llm(model: str | None = None, *, batch: int = 64, dtype: str = "float32") -> LLM:
    """The bundled target in float32, so that texts can be compared; on a GPU the plain decoder, which is quick to start."""
    return LLM(model, method="plain", max_batch_size=batch, dtype=dtype, fast=not torch.cuda.is_available())


def counts_of(llm: LLM, prompts: Sequence[list[int]], method: Method, *, max_tokens: int = 96) -> Counts:
    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=max_tokens), method=method)
    rows = [(o.stats.num_tokens, o.stats.num_accepted, o.stats.num_passes) for o in outputs]
    return Counts.from_rows(rows, [output.token_ids for output in outputs])


def walk(
    draft: DraftLM, prompts: Sequence[list[int]], texts: Sequence[list[int]], num_draft_tokens: int, *, num_rows: int = 32
) -> Counts:
    """The same counts from the target's greedy texts alone: a draft guesses right where its likeliest token is the text's, and
    a round ends at the first miss. One pass of the draft over ``num_rows`` texts at a time."""
    found = list[tuple[int, int, int]]()
    for begin in range(0, len(prompts), num_rows):
        asked, said = prompts[begin : begin + num_rows], texts[begin : begin + num_rows]
        batch = _laid([[*prompt, *text] for prompt, text in zip(asked, said, strict=True)], draft.readout.device)
        with torch.no_grad():
            guessed = draft.logits(draft(batch)).argmax(-1).tolist()
        for prompt, text, row in zip(asked, said, guessed, strict=True):
            own = row[len(prompt) - 1 : len(prompt) - 1 + len(text)]
            found.append(_rounds([mine == true for mine, true in zip(own, text, strict=True)], num_draft_tokens))
    return Counts.from_rows(found, list(texts))


def _laid(texts: Sequence[list[int]], device: torch.device) -> PackedTexts:
    """A text in each row, without the target's states."""
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    places = torch.arange(longest, device=device).expand_as(tokens)
    inside = places < torch.tensor([[len(text)] for text in texts], device=device)
    empty = torch.empty(*tokens.shape, 0, device=device)
    return PackedTexts(tokens, empty, empty, torch.where(inside, 0, -1), places, inside)


def _rounds(hits: list[bool], longest: int) -> tuple[int, int, int]:
    """Tokens, accepted guesses and passes."""
    at = accepted = passes = 0
    while at < len(hits):
        run = next((i for i, hit in enumerate(hits[at : at + longest]) if not hit), len(hits[at : at + longest]))
        at, accepted, passes = at + run + 1, accepted + run, passes + 1
    return len(hits), accepted, passes


def chain_of(llm: LLM, draft: Target, num_draft_tokens: int) -> Method:
    """A draft model that guesses so many tokens a round."""
    return compose("draft-model", llm.target, draft=draft, policy="fixed", options={"num_draft_tokens": num_draft_tokens})
