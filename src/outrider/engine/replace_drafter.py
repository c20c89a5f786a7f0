"""Another drafter for requests that are running, and who may ask for one: a learner that watches what was accepted.

A new drafter reads what it needs to know again from the rows' tokens.

Only between rounds. Every lossless rule is exact whatever the guesses of a round come from, so the text's law does not notice;
under the coupled rule not even the text does.
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
    """A draft model, or heads, that get better while they serve."""

    @abstractmethod
    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        """A request that ended: what was asked, what was said, and where each token of the answer came from."""

    @abstractmethod
    def maybe_update(self, *, is_idle: bool = True) -> Any:
        """A better draft model, or better heads, than the last ones; None if there are none now. Called between rounds;
        ``is_idle`` says that nothing is being served, so that learning may take all the time it wants."""

    @abstractmethod
    def close(self) -> None:
        """Stop learning; what is half learned is dropped."""


@torch.inference_mode()
def replace_drafter(engine: Engine, batch: Batch | None, method: Method) -> None:
    """Go on with another method's drafter and rule. Modifies the engine and the batch. The policy stays, with what it knows of
    costs, and forgets what it learnt of the old drafter's guesses: a better draft must get its chance. A drafter that reads
    the target's states takes no running requests over: the scheduler lets those read themselves again."""
    if batch is not None and method.drafter.taps:
        raise CompositionError(
            f"drafter {type(method.drafter).__name__} reads states of the target that are gone by now; exchange drafters that "
            "need only tokens (draft models, look-ups), or let running requests end first"
        )
    engine.method = Method(method.drafter, method.rule, engine.method.policy)
    if batch is not None:
        batch.drafter_state = method.drafter.start([row.tokens for row in batch.rows], {})
    engine.method.policy.forget(None if batch is None else batch.policy_state)
