"""Runs ``outrider route``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError
from outrider.routing.advantage import Advantage
from outrider.routing.language_models import ModelWriter, StateFeatures, reward_of
from outrider.routing.routers import Coin, RewardThreshold
from outrider.routing.steps import Router, route


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_steps < 1:
        raise OptionError(f"--max-steps {arguments.max_steps} is not valid; use at least 1")
    with waiting("loading models"):
        draft = LLM(arguments.draft or bundled_path("draft"), method="plain")
        target = LLM(arguments.model, method="plain")
        router = _router(arguments, draft)
    end, most = line_ends(arguments.end), arguments.max_tokens
    writer = partial(ModelWriter, end=end, temperature=arguments.temperature, max_tokens=most)
    prompts, writers = [arguments.prompt], (writer(draft), writer(target))
    (found,) = route(prompts, *writers, router, num_steps=arguments.max_steps, seed=arguments.seed)
    print(found.prompt + found.text)
    count = f"{sum(found.escalated)} of {len(found.escalated)} steps by the target"
    print(f"{count}; the others are the draft's and were not verified (LOSSY)", file=sys.stderr)
    return 0


def line_ends(text: str) -> str:
    r"""Text with new lines where somebody typed ``\n``."""
    return text.replace(r"\n", "\n")


def _router(arguments: argparse.Namespace, draft: LLM) -> Router:
    if arguments.router == "random":
        return Coin(arguments.threshold)
    if arguments.router == "arbitrage":
        if arguments.learned is None:
            raise OptionError("router arbitrage needs --learned FILE; make one with `outrider train router`")
        return _learned(arguments, draft)
    if arguments.reward is None:
        raise OptionError("router rsd asks a reward model about each step; name one with --reward MODEL")
    reward = reward_of(LLM(arguments.reward, method="plain"), good=arguments.good, bad=arguments.bad)
    return RewardThreshold(reward, arguments.threshold)


def _learned(arguments: argparse.Namespace, draft: LLM) -> Router:
    """Arbitrage's router, reading the model that it learned to read."""
    learned = Advantage.load(arguments.learned, StateFeatures(draft), threshold=arguments.threshold)
    if json.loads(arguments.learned.read_text()).get("sees") != "reward":
        return learned
    if arguments.reward is None:
        raise OptionError(f"{arguments.learned} was trained with sees=reward; name that reward model with --reward")
    return replace(learned, features=StateFeatures(LLM(arguments.reward, method="plain")))
