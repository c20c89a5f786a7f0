"""``outrider train router``: Arbitrage's router, from steps of a draft and a target that a reward model compares."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.cli.route import line_ends
from outrider.cli.train_options import check_names, filled, read_options
from outrider.core.errors import OptionError, nearest
from outrider.core.method_rows import option_names
from outrider.routing.advantage import compare, learn_advantage, spearman
from outrider.routing.language_models import ModelWriter, StateFeatures, reward_of
from outrider.train.provenance import training_notes


@dataclass(frozen=True)
class RouterSettings:
    """How steps are written and compared."""

    reward: str = ""
    """The reward model: a folder or a hub name."""
    good: str = ""
    """The reward model's word after a good step. Without the two words, the reward is how likely it writes the step."""
    bad: str = ""
    """The reward model's word after a bad step."""
    sees: str = "draft"
    """Whose view of a step the router reads, of the "draft" or of the "reward" model."""
    end: str = r"\n\n"
    """The end of a step."""
    num_steps: int = 16
    """Most steps of a text."""
    step_tokens: int = 128
    """Most tokens of a step."""
    temperature: float = 0.0
    held_out: float = 0.25


def run_router(arguments: argparse.Namespace) -> int:
    """Let both models continue the questions, train the router, and say what it predicts of questions held out."""
    given = read_options(arguments.option)
    check_names(given, option_names(RouterSettings), what="router")
    settings: RouterSettings = filled(RouterSettings, given, {})
    if not settings.reward:
        raise OptionError("training a router needs a reward model; give -O reward=MODEL")
    if settings.sees not in ("draft", "reward"):
        raise OptionError(f"sees = {settings.sees!r} is not valid; {nearest(str(settings.sees), ('draft', 'reward'))}")
    questions = [text for file in arguments.data for text in questions_of(file)]
    if len(questions) < 2:
        raise OptionError("the files hold fewer than two questions, and at least one is held out; give more questions")
    target = LLM(arguments.target, method="plain", device=arguments.device)
    draft = LLM(arguments.draft or bundled_path("draft"), method="plain", device=arguments.device)
    judge = LLM(settings.reward, method="plain", device=arguments.device)
    reward = reward_of(judge, good=settings.good, bad=settings.bad)
    end, most = line_ends(settings.end), settings.step_tokens
    writer = partial(ModelWriter, end=end, temperature=settings.temperature, max_tokens=most)
    writers = writer(draft), writer(target)
    features = StateFeatures(draft if settings.sees == "draft" else judge)
    kept = max(1, round(len(questions) * settings.held_out))
    with waiting(f"writing the answers to {len(questions)} questions with both models"):
        held, seen = (
            compare(part, *writers, reward, features, num_steps=settings.num_steps)
            for part in (questions[:kept], questions[kept:])
        )
    learnt = learn_advantage(seen, features)
    order = spearman(learnt.chances(held.seen), held.gains)
    notes = training_notes(target.model_name, target.target, arguments.data, documents=len(questions), options=given)
    file = arguments.out if arguments.out.suffix == ".json" else arguments.out / "router.json"
    learnt.save(file, {**notes, "draft": draft.model_name, "sees": settings.sees, "spearman": order})
    print(f"{file}: {len(seen.gains)} steps, {len(held.gains)} more held out (LOSSY: routed text is not the target's)")
    better = sum(gain > 0 for gain in held.gains) / max(1, len(held.gains))
    print(f"  the target's step scores higher {better:.1%}; rank correlation of prediction and gain {order:.3f}")
    return 0


def questions_of(file: Path) -> list[str]:
    """Questions of a JSONL file: strings, or objects with ``prompt`` or ``question``."""
    found: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        row: Any = json.loads(line) if line.strip() else None
        text = row.get("prompt", row.get("question")) if isinstance(row, dict) else row
        if isinstance(text, str):
            found.append(text)
        elif row is not None:
            raise OptionError(f"{file}, line {number} holds no question; write a string, or an object with prompt or question")
    return found
