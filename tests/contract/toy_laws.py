"""Toy models and drafting experiments small enough to enumerate: the ground on which acceptance rules are proved.

A toy model is a law over V = 2..4 tokens for every context. An experiment drafts with one, verifies against another,
repeats for some rounds, and continues to a fixed length; ``output_law`` runs every branch of it (drafting included) and
returns the exact law over texts, to be compared with ``text_law``, that of the target alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource, enumerate_law
from outrider.core.verdict import RowVerdict

Text = tuple[int, ...]
ToyModel = Callable[[Text], Tensor]
"""Context -> [V] probabilities, float64. Every call with one context returns the same numbers."""
DRAFT_LANE = 100
"""Guesses of an experiment are drawn on lanes of their own, as in production they have a purpose of their own."""


class RowRule(Protocol):
    """What a proof needs of a rule; mutants are only this."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict: ...


# --- models -----------------------------------------------------------------------------------------------------------


def random_model(seed: int, vocab_size: int, *, concentration: float = 0.7) -> ToyModel:
    """Dirichlet laws, a different one for every context."""

    @cache
    def law(context: Text) -> Tensor:
        chance = random.Random(f"{seed} {context}")
        weights = [chance.gammavariate(concentration, 1.0) for _ in range(vocab_size)]
        return _norm(torch.tensor(weights, dtype=torch.float64))

    return law


def top_k_model(model: ToyModel, k: int) -> ToyModel:
    """The model with all but its k likeliest tokens cut off; k = 1 is greedy decoding."""

    def law(context: Text) -> Tensor:
        p = model(context)
        return _norm(p * (p >= p.sort(descending=True).values[k - 1]))

    return law


def tempered(model: ToyModel, temperature: float) -> ToyModel:
    return lambda context: _norm(model(context) ** (1 / temperature))


def _norm(weights: Tensor) -> Tensor:
    return weights / weights.sum()


@dataclass(frozen=True)
class Pair:
    """A target and a draft model over the same vocabulary."""

    p: ToyModel
    q: ToyModel
    vocab_size: int


def _shifted(model: ToyModel) -> ToyModel:
    return lambda context: model(context).roll(1)


FLAVOURS: dict[str, Callable[[ToyModel, ToyModel], tuple[ToyModel, ToyModel]]] = {
    "random": lambda p, q: (p, q),
    "target cut to two": lambda p, q: (top_k_model(p, 2), q),
    "draft cut to two": lambda p, q: (p, top_k_model(q, 2)),
    "both cut to two": lambda p, q: (top_k_model(p, 2), top_k_model(q, 2)),
    "greedy target": lambda p, q: (top_k_model(p, 1), q),
    "greedy draft law": lambda p, q: (p, top_k_model(q, 1)),
    "both greedy": lambda p, q: (top_k_model(p, 1), top_k_model(q, 1)),
    "draft equals target": lambda p, q: (p, p),
    "supports hardly meet": lambda p, q: (top_k_model(p, 2), _shifted(top_k_model(p, 2))),
}


@cache
def toy_pair(flavour: str, seed: int, vocab_size: int) -> Pair:
    """The same pair for every test that names it, so that its laws are made once."""
    p, q = FLAVOURS[flavour](random_model(2 * seed, vocab_size), random_model(2 * seed + 1, vocab_size))
    return Pair(cache(p), cache(q), vocab_size)


# --- drafting ---------------------------------------------------------------------------------------------------------

ToyDrafter = Callable[[Text, RandomSource], RowDraft]


@dataclass(frozen=True)
class Guess:
    """The question "what is the next child of this node?"."""

    context: Text
    siblings: list[int]
    depth: int
    lane: int
    source: RandomSource


Guesser = Callable[[Guess], "int | None"]
"""A token, or None to leave the node (and everything under it) out of the tree."""


def chain(length: int) -> list[int]:
    return list(range(-1, length))


def grow(pair: Pair, parents: Sequence[int], draws: Draws, guesser: Guesser) -> ToyDrafter:
    """A drafter of trees of one shape, whose tokens come from ``guesser``."""

    def draft(context: Text, source: RandomSource) -> RowDraft:
        contexts, tokens, kept, index = [context], [-1], [-1], {0: 0}
        for node, parent in enumerate(parents[1:], 1):
            if parent not in index:
                continue
            above = index[parent]
            siblings = [tokens[i] for i in range(1, len(tokens)) if kept[i] == above]
            depth = len(contexts[above]) - len(context)
            token = guesser(Guess(contexts[above], siblings, depth, DRAFT_LANE + node, source))
            if token is None:
                continue
            index[node] = len(tokens)
            contexts.append((*contexts[above], token))
            tokens.append(token)
            kept.append(above)
        p, q = laws(tuple(contexts))
        return RowDraft(tokens, kept, p, None if draws is Draws.DETERMINISTIC else q, draws)

    @cache
    def laws(contexts: tuple[Text, ...]) -> tuple[Tensor, Tensor]:
        """Both models' laws at the nodes. Many branches of chance ask for the same ones."""
        return torch.stack([pair.p(c) for c in contexts]), torch.stack([pair.q(c) for c in contexts])

    return draft


def sampled(pair: Pair) -> Guesser:
    """Independently from q."""
    return lambda guess: guess.source.categorical(pair.q(guess.context), guess.lane)


def sampled_without_replacement(pair: Pair) -> Guesser:
    """From q without the earlier siblings, until q is used up."""

    @cache
    def left_of(context: Text, siblings: Text) -> Tensor | None:
        left = pair.q(context).clone()
        left[list(siblings)] = 0
        return left if left.sum() > 0 else None

    def pick(guess: Guess) -> int | None:
        left = left_of(guess.context, tuple(guess.siblings))
        return None if left is None else guess.source.categorical(left, guess.lane)

    return pick


def top_k(pair: Pair) -> Guesser:
    """The likeliest tokens of q in order."""
    return lambda guess: int(pair.q(guess.context).argsort(descending=True, stable=True)[len(guess.siblings)])


def arbitrary(pair: Pair, seed: int) -> Guesser:
    """Any function of the context; siblings may be equal."""

    def pick(guess: Guess) -> int:
        return random.Random(f"{seed} {guess.context} {len(guess.siblings)}").randrange(pair.vocab_size)

    return pick


def clairvoyant(pair: Pair) -> Guesser:
    """Sees the target's noise, and guesses right only where the choice *after* the guess is not 0: stops for the future."""

    def pick(guess: Guess) -> int:
        choice = guess.source.target_choice(pair.p(guess.context), guess.depth)
        after = guess.source.target_choice(pair.p((*guess.context, choice)), guess.depth + 1)
        return choice if after != 0 else (choice + 1) % pair.vocab_size

    return pick


def by_draws(pair: Pair, draws: Draws) -> Guesser:
    return {
        Draws.IID: sampled,
        Draws.WITHOUT_REPLACEMENT: sampled_without_replacement,
        Draws.BEAM: sampled_without_replacement,  # the same, in a shape that no toy drafter chooses
        Draws.DETERMINISTIC: top_k,
    }[draws](pair)


# --- rounds -----------------------------------------------------------------------------------------------------------


class RoundSource(RandomSource):
    """A source as one round sees it, named as in production: the target's numbers by the absolute output position, all
    others by the position the round starts from."""

    def __init__(self, inner: RandomSource, start: int) -> None:
        self.inner, self.start = inner, start

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self.inner.bernoulli(probability, 1000 * self.start + lane)

    def categorical(self, weights: Tensor, lane: int) -> int:
        return self.inner.categorical(weights, 1000 * self.start + lane)

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return self.inner.target_choice(probs, self.start + depth)


@dataclass(frozen=True)
class Experiment:
    """Rounds of drafting and verifying, then ``finish`` to a text of ``length`` tokens."""

    pair: Pair
    drafter: ToyDrafter
    length: int
    rounds: int = 1
    by_rule: bool = False
    """Continue with draftless rounds of the rule instead of with p. Needed where a drafter has looked at the target's
    noise: what follows must then use that noise. (Elsewhere p says the same, and need not be enumerated.)"""
    round_source: Callable[[RandomSource, int], RandomSource] = RoundSource

    def run(self, rule: RowRule, source: RandomSource) -> Text:
        text: Text = ()
        nothing = grow(self.pair, [-1], Draws.DETERMINISTIC, top_k(self.pair))
        for number in itertools.count():
            if len(text) >= self.length or (number >= self.rounds and not self.by_rule):
                return text[: self.length]
            drafter = self.drafter if number < self.rounds else nothing
            text += emitted(rule, drafter, text, self.round_source(source, len(text)))
        raise AssertionError


def emitted(rule: RowRule, drafter: ToyDrafter, context: Text, source: RandomSource) -> Text:
    """What one round adds to a text."""
    row = drafter(context, source)
    verdict = rule.walk_row(row, source)
    assert verdict.rejected == bool(row.children(verdict.path[-1] if verdict.path else 0))
    return (*(row.tokens[node] for node in verdict.path), verdict.next_token)


def output_law(rule: RowRule, experiment: Experiment) -> dict[Text, float]:
    """The exact law of the experiment's text under the rule."""
    law: dict[Text, float] = {}
    for begun, weight in enumerate_law(lambda source: experiment.run(rule, source)).items():
        for text, probability in continuations(experiment.pair, begun, experiment.length):
            law[text] = law.get(text, 0.0) + weight * probability
    return law


def continuations(pair: Pair, begun: Text, length: int) -> list[tuple[Text, float]]:
    """Every continuation of ``begun`` to ``length`` tokens with its probability under the target."""
    texts = [(begun, 1.0)]
    for _ in range(length - len(begun)):
        texts = [((*t, v), w * pv) for t, w in texts for v, pv in enumerate(pair.p(t).tolist()) if pv > 0]
    return texts


def text_law(pair: Pair, length: int) -> dict[Text, float]:
    """The target's own law over texts."""
    return dict(continuations(pair, (), length))


def total_variation(a: dict[Text, float], b: dict[Text, float]) -> float:
    return 0.5 * math.fsum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys())


def distance(rule: RowRule, experiment: Experiment) -> float:
    """THE CHECK: total variation between what the rule emits and what the target says. 0 is lossless."""
    law = output_law(rule, experiment)
    assert abs(math.fsum(law.values()) - 1) < 1e-9, "the branches do not add up: a branch was lost"
    return total_variation(law, text_law(experiment.pair, experiment.length))


def mean_emitted(rule: RowRule, experiment: Experiment) -> float:
    """Expected number of tokens of one round."""
    law = enumerate_law(lambda source: len(emitted(rule, experiment.drafter, (), RoundSource(source, 0))))
    return math.fsum(length * weight for length, weight in law.items())
