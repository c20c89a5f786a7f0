"""Measures the loss of a lossy rule: its one-step total variation on the laws of these two models.

The enumeration of ``proof.py`` runs on toys of three tokens, where a rule of neighbours may happen to be exact. Here the law of
the first token is taken in closed form instead, in contexts of the target's own text, with the draft model's law as q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from outrider.acceptance.distance import measure
from outrider.acceptance.lossy import LossyRule
from outrider.bench.audit.findings import Finding, failed, skipped
from outrider.bench.audit.traces import law_at, wide_logits
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, Target
from outrider.core.params import SamplingParams

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and the tokens after it."""


def judge_loss(
    rule: AcceptanceRule, draws: Draws, models: tuple[Target, Target | None], texts: Sequence[Text], params: SamplingParams
) -> Finding:
    """The loss over all positions of ``texts``. ``models`` are target and draft."""
    target, draft = models
    if draft is None or draft.vocab_size < target.vocab_size:
        return skipped("loss", "no draft model of the target's vocabulary, so there is no q to measure the loss with")
    p, q = (_laws(model, texts, params)[:, : target.vocab_size] for model in (target, draft))
    q = _likeliest(q) if draws is Draws.DETERMINISTIC else q / q.sum(-1, keepdim=True)
    loss = measure(cast(LossyRule, rule), p, q)
    return failed("loss", str(loss), tv_mean=float(loss.tv.mean()), tv_max=float(loss.tv.max()))


def _laws(model: Target, texts: Sequence[Text], params: SamplingParams) -> Tensor:
    """[M, V]"""
    return torch.stack([law_at(logits, params) for text in texts for logits in wide_logits(model, *text)])


def _likeliest(law: Tensor) -> Tensor:
    """A chosen guess, as a law with one possible token."""
    return torch.zeros_like(law).scatter(1, law.argmax(-1, keepdim=True), 1.0)
