"""The learner of ``outrider serve --learn``, for the draft model or the heads of the served method.

Methods that remember (n-grams, suffixes, successors of tokens) learn by being used, with or without ``--learn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider.api import LLM
from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.engine.replace_drafter import Learner
from outrider.methods import METHODS
from outrider.models.heads import load_head
from outrider.models.load import load_model
from outrider.train.draft_lm import DraftLM
from outrider.train.online import OnlineSettings, online_draft, online_heads, online_sorted_draft


@dataclass(frozen=True, eq=False)
class Taught:
    """A learner, and the function that puts its result into service."""

    learner: Learner
    install: Callable[[Any], None]


def taught(llm: LLM, settings: OnlineSettings, *, dtype: str = "auto", device: str | None = None) -> Taught | None:
    """The learner of a model's method; None for methods that learn by being used. It has its own copy of the target,
    because the served one belongs to the engine's thread."""
    if llm.draft_names:
        target = _second_target(llm, dtype, device)
        return Taught(_draft_learner(llm, target, settings), llm.replace_draft)
    if llm.heads_name is not None:
        target = _second_target(llm, dtype, device)
        head = load_head(llm.heads_name, target, dtype=torch.float32, ends=llm.model_name)
        served = torch.float32 if target.device.type == "cpu" else target.dtype
        return Taught(online_heads(head, target, settings, dtype=served), llm.replace_heads)
    if llm.method.drafter.memories:
        return None
    raise OptionError(
        f"--learn has nothing to train: method {llm.method_name!r} has no draft model, no heads and no memory; name a draft "
        "with --draft, or a method that learns, as 'eagle3' or 'suffix'"
    )


def _draft_learner(llm: LLM, target: Target, settings: OnlineSettings) -> Learner:
    draft, dtype = DraftLM.load(llm.draft_names[0], target.device), llm.drafts[0].dtype
    if METHODS[llm.method_name].needs_layers:
        return online_sorted_draft(draft, target, settings, dtype=dtype, exits=llm.option("exits"))
    return online_draft(draft, target, settings, dtype=dtype)


def _second_target(llm: LLM, dtype: str, device: str | None) -> Target:
    return load_model(llm.model_name, dtype=dtype, device=device, fast=False)
