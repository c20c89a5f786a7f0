"""Training the acceptance head of SpecDec++, which predicts whether the target accepts a guess.

The draft is frozen. It guesses after every position of texts that the target wrote. Its guess is the likeliest token
(temperature 0) or drawn from q. The label is the chance that the target accepts it (Huang et al. 2024, arXiv 2405.19715).

The paper mixes guesses into the text. Here the text is the target's, because a policy asks about a guess *given that those
before it were accepted*.

    label = [argmax p = argmax q]   or   min(1, p(x) / q(x)), x ~ q;         loss = BCE, rejected parts weighted by w

A checkpoint is judged by the share of guesses whose fate it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.models.acceptance_head import AcceptanceHead
from outrider.models.heads import PackedTexts
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import BatchOutcome, Objective


@dataclass(frozen=True)
class AcceptanceSettings:
    """The guesses that the head predicts, and its shape."""

    temperature: float = 0.0
    """0 guesses the likeliest token; above 0, guesses are sampled at this temperature."""
    reject_weight: float = 1.0
    """Weight of the rejected part of the loss. The paper uses 6. With 1 the predictions are calibrated probabilities."""
    width: int = 32
    num_blocks: int = 3
    chunk: int = 1 << 24

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.reject_weight <= 0 or self.width < 1 or self.num_blocks < 0:
            found = f"temperature = {self.temperature}, reject_weight = {self.reject_weight}, width = {self.width}"
            raise OptionError(f"{found} are not valid; use 0 or more, more than 0, and a whole number from 1")


@final
class AcceptanceObjective(Objective):
    """Trains a head to predict whether a frozen draft's guesses are accepted."""

    name = "acceptance-head"
    taps = ()

    def __init__(self, draft: DraftLM, target: Target, settings: AcceptanceSettings) -> None:
        self.draft, self.target, self.settings = draft.requires_grad_(False), target, settings
        config = draft.config
        self.head = self.module = AcceptanceHead.of_draft(
            config.hidden_size, config.vocab_size, width=settings.width, num_blocks=settings.num_blocks
        ).to(target.device)

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        valid = batch.valid(0)
        with torch.no_grad():
            states = self.draft(batch).flatten(0, 1)
        last, size = batch.last.flatten(0, 1), max(1, self.settings.chunk // self.target.vocab_size)
        pieces = [self._chunk(states[b : b + size], last[b : b + size]) for b in range(0, len(states), size)]
        losses, hits = (torch.cat(part).view_as(valid) for part in zip(*pieces, strict=True))
        loss = (losses * valid).sum() / valid.sum().clamp(min=1)
        return BatchOutcome(loss, [hits & valid], [valid])

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.head.folded(self.draft.readout).save(folder, {**notes, "draft": self.draft.origin.name})

    def verdict(self, length: float) -> str:
        """Explains the loop's "accepted length", which is not one here: it is one more than the share of right predictions."""
        return f"{length - 1:.1%} of the guesses' fates predicted (held out), share"

    def _chunk(self, states: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and where the prediction is right."""
        with torch.no_grad():
            guesses, log_q, label = self._fates(self.draft.logits(states).float(), self.target.logits(last).float())
        odds = self.head(states.float(), guesses, log_q).float()
        weight = label + self.settings.reject_weight * (1 - label)
        losses = F.binary_cross_entropy_with_logits(odds, label, reduction="none") * weight
        return losses, (odds > 0) == (label > 0.5)

    def _fates(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guesses, their log-probabilities under the draft, and their acceptance probabilities."""
        if self.settings.temperature == 0:
            guesses = q.argmax(-1)
            label = (guesses == p.argmax(-1)).float()
        else:
            log_q, log_p = (x.div(self.settings.temperature).log_softmax(-1) for x in (q, p))
            guesses = torch.multinomial(log_q.exp(), 1)[:, 0]
            label = (log_p - log_q).gather(-1, guesses[:, None])[:, 0].exp().clamp(max=1.0)
        return guesses, q.log_softmax(-1).gather(-1, guesses[:, None])[:, 0], label
