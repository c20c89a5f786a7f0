"""Trains the head of rule ``judge`` on checkable answers: a guess is harmless if it does not change the answer. No human labels
are needed.

The target answers a question. At each position where the draft would choose another token, that token is inserted, the target
continues from there, and the two answers are compared (AutoJudge, arXiv 2504.20039). An example is the law after the token, its
label is whether the answer stayed the same, and the head is a logistic regression.

    label(i) = [ answer(y_1 .. y_{i-1}, d_i, target goes on) = answer(y) ],      d_i = the draft's greedy token, d_i != y_i
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.api import LLM
from outrider.codecs.text import TextCodec
from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.regression import balanced_logistic
from outrider.models.judge_head import JudgeHead, features

Answer = Callable[[str], str]
"""Extracts the part of a text that is compared."""
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def last_number(text: str) -> str:
    """The last number of the text, which is the answer of most exercises."""
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


def read_questions(paths: Sequence[Path], codec: TextCodec) -> list[list[int]]:
    """Questions of JSONL files: strings, or objects with ``question``, ``prompt`` or ``messages``."""
    found: list[list[int]] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                found.append(_question(json.loads(line), codec, f"{path}, line {number}"))
    if not found:
        raise OptionError("the files hold no questions; write one JSON value per line")
    return found


def _question(row: Any, codec: TextCodec, place: str) -> list[int]:
    if isinstance(row, str):
        return codec.encode(row)
    if isinstance(row, Mapping) and isinstance(row.get("prompt"), str):
        return codec.encode(row["prompt"])
    if isinstance(row, Mapping) and (row.get("messages") or isinstance(row.get("question"), str)):
        messages = row.get("messages") or [{"role": "user", "content": row["question"]}]
        return codec.encode_chat(messages) if codec.chat_template else codec.encode(str(messages[-1]["content"]))
    raise OptionError(f"{place} holds no question; write a string, or an object with question, prompt or messages")


@dataclass(frozen=True, eq=False)
class Example:
    """A guess that differs from the target's token, and whether the answer changed."""

    law: Tensor
    """[V] the target's law after the guess."""
    given: float
    """The target's probability of the guess."""
    harmless: bool


@dataclass(frozen=True)
class JudgeSettings:
    """How examples are made and the head is trained."""

    max_tokens: int = 64
    """Most tokens of an answer."""
    most_guesses: int = 4
    """Guesses tried per question."""
    num_steps: int = 300
    weight_decay: float = 1e-2
    held_out: float = 0.25
    seed: int = 0


def examples_of(
    llm: LLM, draft: Target, questions: Sequence[list[int]], *, answer: Answer, settings: JudgeSettings
) -> list[Example]:
    """Put the draft's guesses into the target's answers, and check whether the answers change."""
    params, chance = SamplingParams(max_tokens=settings.max_tokens), random.Random(settings.seed)
    tried: list[_Trial] = []
    for out in llm.generate(list(questions), params, method="plain"):
        found = _disagreements(draft, out.prompt_token_ids, out.token_ids)
        right = answer(_text(llm, out.prompt_token_ids, out.token_ids))
        for place, guess in sorted(chance.sample(found, min(len(found), settings.most_guesses))):
            tried.append(_Trial(out.prompt_token_ids, [*out.token_ids[:place], guess], right))
    going = [[*one.question, *one.begun] for one in tried]
    ends = llm.generate(going, params, method="plain") if going else []
    return [
        Example(*_laws(llm.target, ids), harmless=answer(_text(llm, one.question, [*one.begun, *out.token_ids])) == one.right)
        for one, ids, out in zip(tried, going, ends, strict=True)
    ]


@dataclass(frozen=True)
class _Trial:
    """An answer that continues from a guess."""

    question: list[int]
    begun: list[int]
    right: str
    """The target's own answer."""


def _text(llm: LLM, question: Sequence[int], said: Sequence[int]) -> str:
    return llm.codec.decode([token for token in said if token not in llm.codec.eos_ids], prompt_ids=question)


@torch.inference_mode()
def _disagreements(draft: Target, prompt: Sequence[int], said: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of an answer where the draft's greedy token differs, with that token."""
    tap = draft.num_layers
    states = draft.prefill([[*prompt, *said]], draft.new_cache(1), taps=[tap])[tap][0]
    best = draft.logits(states[len(prompt) - 1 : -1]).argmax(-1).tolist()
    return [(place, guess) for place, (guess, token) in enumerate(zip(best, said, strict=True)) if guess != token]


@torch.inference_mode()
def _laws(target: Target, ids: Sequence[int]) -> tuple[Tensor, float]:
    """The law after the last token, and that token's probability."""
    tap = target.num_layers
    states = target.prefill([list(ids)], target.new_cache(1), taps=[tap])[tap][0]
    before, after = target.logits(states[-2:]).double().softmax(-1)
    return after.clone(), float(before[ids[-1]])


@dataclass(frozen=True)
class JudgeQuality:
    """Quality of a head on held-out examples."""

    num_examples: int
    share_harmless: float
    kept_of_harmless: float
    kept_of_harmful: float
    auc: float
    """Probability that a harmless guess scores higher than a harmful one."""
    distance: float
    """Mean total variation of a step in which target and draft disagree: [kept] (1 - p(guess))."""


def train_judge(examples: Sequence[Example], basis: Tensor, *, settings: JudgeSettings) -> tuple[JudgeHead, JudgeQuality]:
    """Train a head, and evaluate it on held-out examples. ``basis`` [V, H] turns log-probabilities into features."""
    chance = random.Random(settings.seed)
    shuffled = chance.sample(list(examples), len(examples))
    kept = max(1, round(len(shuffled) * settings.held_out))
    held, learnt = shuffled[:kept], shuffled[kept:]
    if len({one.harmless for one in learnt}) < 2:
        raise OptionError(
            f"{len(examples)} guesses of the draft were tried and all had one outcome, so there is nothing to learn; "
            "give more questions, or a draft that differs from the target in words and in errors"
        )
    head = _fit(learnt, basis, settings)
    return head, verdict_of(head, held)


def verdict_of(head: JudgeHead, examples: Sequence[Example], *, threshold: float = 0.5) -> JudgeQuality:
    """Evaluate a head on examples."""
    odds = head.log_odds(torch.stack([one.law for one in examples]))
    label = torch.tensor([one.harmless for one in examples])
    kept = odds.sigmoid() > threshold
    off = torch.tensor([1 - one.given for one in examples])
    return JudgeQuality(
        len(examples), _mean(label), _mean(kept[label]), _mean(kept[~label]), _auc(odds, label), _mean(kept * off)
    )


def _fit(examples: Sequence[Example], basis: Tensor, settings: JudgeSettings) -> JudgeHead:
    """Logistic regression with equal weight for both classes."""
    seen = features(torch.stack([one.law for one in examples])) @ basis
    label = torch.tensor([float(one.harmless) for one in examples], dtype=torch.float64)
    weights, bias = balanced_logistic(seen, label, decay=settings.weight_decay, num_steps=settings.num_steps)
    return JudgeHead(basis @ weights, bias)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _auc(odds: Tensor, label: Tensor) -> float:
    good, bad = odds[label], odds[~label]
    if not len(good) or not len(bad):
        return 0.5
    above = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad)
    return float(above.mean())
