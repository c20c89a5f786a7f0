"""Toy models and rounds that are small enough to enumerate, so that a rule's output law is computed instead of sampled.

A toy model is a law over two or three tokens for every context. An experiment drafts with one toy model, verifies against
another for one or two rounds, and continues with the target's law to a fixed length. Every branch is run, drafting included,
and the probabilities of the texts are added up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource, enumerate_law

Text = tuple[int, ...]
ToyModel = Callable[[Text], Tensor]
_DRAFT_LANE = 100
_ROUND = 1000
"""Random lanes of a round; those of the next round begin after them."""


def random_model(seed: int, vocab_size: int, *, keep: int | None = None) -> ToyModel:
    """Dirichlet laws, another for every context, cut to the ``keep`` likeliest tokens."""

    @cache
    def law(context: Text) -> Tensor:
        chance = random.Random(f"{seed} {context}")
        weights = torch.tensor([chance.gammavariate(0.7, 1.0) for _ in range(vocab_size)], dtype=torch.float64)
        if keep is not None:
            weights = weights * (weights >= weights.sort(descending=True).values[keep - 1])
        return weights / weights.sum()

    return law


@final
class _RoundSource(RandomSource):
    """A random source as one round sees it: the target's numbers by output position, the others by the round's start."""

    def __init__(self, inner: RandomSource, start: int) -> None:
        self._inner, self._start = inner, start

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self._inner.bernoulli(probability, _ROUND * self._start + lane)

    def categorical(self, weights: Tensor, lane: int) -> int:
        return self._inner.categorical(weights, _ROUND * self._start + lane)

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return self._inner.target_choice(probs, self._start + depth)


@dataclass(frozen=True)
class Experiment:
    """Rounds that draft and verify trees of one shape."""

    p: ToyModel
    q: ToyModel
    parents: Sequence[int]
    draws: Draws
    length: int
    rounds: int = 1

    def distance(self, rule: AcceptanceRule) -> float:
        """Total variation between the law of the emitted text and the target's."""
        law: dict[Text, float] = {}
        for begun, weight in enumerate_law(lambda source: self._run(rule, source)).items():
            for text, chance in self._continued(begun):
                law[text] = law.get(text, 0.0) + weight * chance
        truth = dict(self._continued(()))
        return 0.5 * math.fsum(abs(law.get(text, 0.0) - truth.get(text, 0.0)) for text in law.keys() | truth.keys())

    def _run(self, rule: AcceptanceRule, source: RandomSource) -> Text:
        text: Text = ()
        for _ in range(self.rounds):
            if len(text) >= self.length:
                break
            seen = _RoundSource(source, len(text))
            row = self._draft(text, seen)
            verdict = rule.walk_row(row, seen)
            text += (*(row.tokens[node] for node in verdict.path), verdict.next_token)
        return text[: self.length]

    def _draft(self, context: Text, source: RandomSource) -> RowDraft:
        contexts, tokens, kept, index = [context], [-1], [-1], {0: 0}
        for node, parent in enumerate(self.parents[1:], 1):
            if parent not in index:
                continue
            above = index[parent]
            siblings = [tokens[i] for i in range(1, len(tokens)) if kept[i] == above]
            token = self._guess(contexts[above], siblings, node, source)
            if token is not None:
                index[node] = len(tokens)
                contexts.append((*contexts[above], token))
                tokens.append(token)
                kept.append(above)
        p, q = (torch.stack([model(each) for each in contexts]) for model in (self.p, self.q))
        return RowDraft(tokens, kept, p, None if self.draws is Draws.DETERMINISTIC else q, self.draws)

    def _guess(self, context: Text, siblings: list[int], node: int, source: RandomSource) -> int | None:
        law = self.q(context)
        if self.draws is Draws.DETERMINISTIC:
            return int(law.argsort(descending=True, stable=True)[len(siblings)]) if len(siblings) < len(law) else None
        if self.draws is not Draws.IID:
            law = law.index_fill(0, torch.tensor(siblings, dtype=torch.int64), 0.0)
        return source.categorical(law, _DRAFT_LANE + node) if float(law.sum()) > 0 else None

    def _continued(self, begun: Text) -> list[tuple[Text, float]]:
        texts = [(begun, 1.0)]
        for _ in range(self.length - len(begun)):
            texts = [((*t, v), w * pv) for t, w in texts for v, pv in enumerate(self.p(t).tolist()) if pv > 0]
        return texts
