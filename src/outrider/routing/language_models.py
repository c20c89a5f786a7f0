"""Language models as writers, as reward models and as features for a router. The engine runs all of them.

A step ends with a string (``end``), at which generation stops. A reward model has learnt to say one word after a good step and
another after a bad one, as Math-Shepherd's does. A plain model can be asked how likely it would write the step.

    words:  reward(x, z) = p(good | x z) / (p(good | x z) + p(bad | x z))      likelihood:  reward(x, z) = p(z | x)^(1 / |z|)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.api import LLM
from outrider.core.errors import OptionError
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.routing.advantage import Features
from outrider.routing.steps import Reward, StepWriter, WrittenStep


@final
@dataclass(frozen=True, eq=False)
class ModelWriter(StepWriter):
    """A model that writes one step at a time."""

    llm: LLM
    end: str = "\n\n"
    """The end of a step."""
    temperature: float = 0.0
    max_tokens: int = 256
    """Most tokens of a step. A step that reaches this length ends the text."""
    method: Method | str | None = None
    """How the model decodes; None for the method that it was loaded with. Lossless methods change no step."""

    def write(self, texts: Sequence[str], seeds: Sequence[int]) -> list[WrittenStep]:
        params = [
            SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=seed, stop=[self.end],
                include_stop_str_in_output=True,
            )
            for seed in seeds
        ]  # fmt: skip
        outs = self.llm.generate(list(texts), params, method=self.method)
        return [WrittenStep(out.text, is_last=not out.text.endswith(self.end)) for out in outs]


def states_of(llm: LLM, texts: Sequence[str]) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens of every text, and the last layer's output [T, H] at each of them."""
    tap, rows = llm.target.num_layers, [llm.codec.encode(text) for text in texts]
    return rows, llm.target.prefill(rows, llm.target.new_cache(len(rows)), taps=[tap])[tap]


@final
class WordReward(Reward):
    """A model that says ``good`` or ``bad`` after a step."""

    def __init__(self, llm: LLM, *, good: str = "yes", bad: str = "no", ask: str = "") -> None:
        """``ask`` is put after every step, such as a question that the words answer."""
        self.llm, self.ask = llm, ask
        self._ids = [_only_token(llm, word) for word in (good, bad)]
        if self._ids[0] == self._ids[1]:
            raise OptionError(
                f"{good!r} and {bad!r} begin with the same token, so they cannot be told apart; choose other words"
            )

    @torch.inference_mode()
    def score(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        read = [text + step.text + self.ask for text, step in zip(texts, steps, strict=True)]
        logits = self.llm.target.logits(torch.stack([states[-1] for states in states_of(self.llm, read)[1]]))
        return logits[:, self._ids].double().softmax(-1)[:, 0].tolist()


def _only_token(llm: LLM, word: str) -> int:
    """The token with which a word begins."""
    ids = llm.codec.encode(word, add_special_tokens=False)
    if not ids:
        raise OptionError(f"the reward model has no token for {word!r}; name the words that it was taught")
    return ids[0]


@torch.inference_mode()
def log_probabilities(llm: LLM, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[tuple[Tensor, Tensor]]:
    """For every step: the log-probabilities [N] of its tokens after its text, and the last layer's output [H] at its end."""
    begins = [len(llm.codec.encode(text)) for text in texts]
    rows, states = states_of(llm, [text + step.text for text, step in zip(texts, steps, strict=True)])
    found = list[tuple[Tensor, Tensor]]()
    for ids, known, begin in zip(rows, states, begins, strict=True):
        first = max(1, min(begin, len(ids) - 1))  # the first token of all has no probability
        laws = llm.target.logits(known[first - 1 : -1]).float().log_softmax(-1)
        said = torch.tensor(ids[first:], dtype=torch.int64, device=laws.device)
        found.append((laws.gather(-1, said[:, None])[:, 0], known[-1].float()))
    return found


@final
@dataclass(frozen=True, eq=False)
class LikelihoodReward(Reward):
    """The likelihood of a step under a model: the geometric mean of its tokens' probabilities."""

    llm: LLM

    def score(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        return [float(said.mean().exp()) if len(said) else 0.0 for said, _ in log_probabilities(self.llm, texts, steps)]


def reward_of(llm: LLM, *, good: str = "", bad: str = "") -> Reward:
    """A reward model that is asked for two words, or one by likelihood if no words are given."""
    return WordReward(llm, good=good, bad=bad) if good or bad else LikelihoodReward(llm)


@final
@dataclass(frozen=True, eq=False)
class StateFeatures(Features):
    """Features from a model that reads the step: mean and least log-probability of its tokens, and its last state, scaled to
    mean square 1. Using the draft itself costs least."""

    llm: LLM

    def of(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> Tensor:
        return torch.stack([self._row(*known) for known in log_probabilities(self.llm, texts, steps)])

    def _row(self, said: Tensor, last: Tensor) -> Tensor:
        known = torch.stack([said.mean(), said.min()]) if len(said) else last.new_zeros(2)
        return torch.cat([known, last * last.pow(2).mean().clamp(min=1e-12).rsqrt()]).cpu()
