"""Step-level routing (LOSSY): a draft writes a whole step, and a router decides whether the target writes it again.

A kept step is not verified by the target at all, so the text is a mixture of two models. The measure is the share of right
answers, against the share of steps that the target had to write.

    from outrider.routing.language_models import ModelWriter, StateFeatures
    draft, target = ModelWriter(LLM(SMALL, method="plain")), ModelWriter(LLM(MODEL))
    route(["question"], draft, target, Coin(0.3), num_steps=20)[0].text
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WrittenStep:
    """A step: a part of a text, with the mark that ends it."""

    text: str
    is_last: bool = False
    """Whether the text ends with it."""


class StepWriter(ABC):
    """Writes steps."""

    @abstractmethod
    def write(self, texts: Sequence[str], seeds: Sequence[int]) -> list[WrittenStep]:
        """The next step of every text. The same seed gives the same step."""


class Reward(ABC):
    """Scores steps with a reward model."""

    @abstractmethod
    def score(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        """The score of each step after its text, from 0 to 1."""


@dataclass(eq=False)
class Turn:
    """The next step of several texts, with what a router may know."""

    texts: Sequence[str]
    steps: Sequence[WrittenStep]
    """The draft's steps."""
    seeds: Sequence[int]
    target: StepWriter
    _written: dict[int, WrittenStep] = field(default_factory=dict)

    def again(self, places: Sequence[int]) -> list[WrittenStep]:
        """The target's steps for these texts. Each is written once, however often it is asked for."""
        new = [place for place in places if place not in self._written]
        if new:  # a draw of its own: with the draft's noise both would tend to err alike
            found = self.target.write([self.texts[i] for i in new], [self.seeds[i] ^ 1 for i in new])
            self._written.update(zip(new, found, strict=True))
        return [self._written[place] for place in places]


class Router(ABC):
    """Decides which of the draft's steps the target writes again."""

    @abstractmethod
    def escalates(self, turn: Turn) -> list[bool]:
        """Whether the target writes each step again."""


@dataclass(eq=False)
class Routed:
    """One text, with the writer of each step."""

    prompt: str
    steps: list[WrittenStep] = field(default_factory=list)
    escalated: list[bool] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text written after the prompt."""
        return "".join(step.text for step in self.steps)

    @property
    def is_done(self) -> bool:
        return bool(self.steps) and self.steps[-1].is_last


def route(
    prompts: Sequence[str], draft: StepWriter, target: StepWriter, router: Router, *, num_steps: int, seed: int = 0
) -> list[Routed]:
    """Write every text step by step, until it ends or has ``num_steps`` steps."""
    found = [Routed(prompt) for prompt in prompts]
    for turn, open_texts in turns(found, draft, target, num_steps=num_steps, seed=seed):
        marks = router.escalates(turn)
        places = [place for place, mark in enumerate(marks) if mark]
        again = dict(zip(places, turn.again(places), strict=True))
        for place, (one, mark) in enumerate(zip(open_texts, marks, strict=True)):
            one.steps.append(again[place] if mark else turn.steps[place])
            one.escalated.append(mark)
    return found


def turns(
    found: Sequence[Routed], draft: StepWriter, target: StepWriter, *, num_steps: int, seed: int
) -> Iterator[tuple[Turn, list[Routed]]]:
    """Yields every turn, and the texts that take part in it. The caller appends the steps before the next turn begins."""
    for number in range(num_steps):
        open_texts = [one for one in found if not one.is_done]
        if not open_texts:
            return
        seeds = [
            random.Random(f"{seed} {place} {number}").getrandbits(32) for place, one in enumerate(found) if not one.is_done
        ]
        texts = [one.prompt + one.text for one in open_texts]
        yield Turn(texts, draft.write(texts, seeds), seeds, target), open_texts


def share_escalated(texts: Sequence[Routed]) -> float:
    """Share of the steps that the target wrote."""
    return sum(sum(text.escalated) for text in texts) / max(1, sum(len(text.escalated) for text in texts))
