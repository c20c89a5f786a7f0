"""Replaces the drafter of running requests. A learner supplies the new one, trained on what was accepted.

A new drafter reads what it needs to know again from the rows' tokens.

It is done between rounds. Every lossless rule is exact wherever the guesses of a round come from, so the law of the text stays
the same. Under the coupled rule the text itself stays the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from outrider.core.errors import CompositionError
from outrider.core.method import Method
from outrider.core.request import Origin
from outrider.engine.step import Batch, Engine


class Learner(ABC):
    """A draft model or heads that are trained while they serve."""

    @abstractmethod
    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        """Observe a finished request: prompt, answer, and the origin of each answer token."""

    @abstractmethod
    def maybe_update(self, *, is_idle: bool = True) -> Any:
        """A better draft model or better heads than the last ones; None if there are none yet. It is called between rounds.
        ``is_idle`` says that nothing is being served, so learning may take all the time it needs."""

    @abstractmethod
    def close(self) -> None:
        """Stop learning, and drop unfinished work."""


@torch.inference_mode()
def replace_drafter(engine: Engine, batch: Batch | None, method: Method) -> None:
    """Continue with another method's drafter and rule. Modifies the engine and the batch. The policy keeps its costs, and
    forgets the acceptance of the old drafter, so that a better one gets its chance. A drafter that reads the target's states
    cannot take over running requests: the scheduler lets those be read again."""
    if batch is not None and method.drafter.taps:
        raise CompositionError(
            f"drafter {type(method.drafter).__name__} reads states of the target that are no longer kept; replace "
            "only drafters that read tokens alone (draft models, look-ups), or let running requests end first"
        )
    engine.method = Method(method.drafter, method.rule, engine.method.policy)
    if batch is not None:
        batch.drafter_state = method.drafter.start([row.tokens for row in batch.rows], {})
    engine.method.policy.forget(None if batch is None else batch.policy_state)
