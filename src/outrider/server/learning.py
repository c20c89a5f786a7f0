"""Learning while serving: finished requests are used for training, and a better draft model or better heads are put into
service between two rounds.

The learner (``engine/replace_drafter.py``; ``outrider serve --learn`` makes one that distils) decides when a draft is better,
on requests it never learned from. It has a budget of time: a small share while requests are served, all of it while none are.
This file tells the learner which requests ended, asks it between rounds, and contains its failures: a learner that fails is not
asked again, and serving goes on. Learning changes no text (``docs/lossless.md``), only its speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from outrider.core.request import RequestState
from outrider.engine.replace_drafter import Learner
from outrider.server.metrics import Metrics

_LOG = logging.getLogger("outrider.server")


@final
class ServerLearner:
    """Connects a learner to the server. Without a learner it does nothing."""

    def __init__(self, learner: Learner | None, metrics: Metrics, *, swap: Callable[[Any], None]) -> None:
        """``swap`` puts the learner's result into service."""
        self._learner, self._metrics, self._swap = learner, metrics, swap

    @property
    def is_on(self) -> bool:
        return self._learner is not None

    def ended(self, state: RequestState) -> None:
        """Tell the learner of a finished request."""
        if self._learner is None:
            return
        try:
            self._learner.observe(state.request.prompt_ids, state.output_ids, state.origins)
        except Exception as error:
            self._give_up(error)

    def between_rounds(self, *, is_idle: bool) -> None:
        """Put a better draft into service, if there is one. ``is_idle`` says that no request is running."""
        if self._learner is None:
            return
        try:
            better = self._learner.maybe_update(is_idle=is_idle)
        except Exception as error:
            self._give_up(error)
            return
        if better is not None:
            self._swap(better)
            self._metrics.draft_swaps.inc()
            _LOG.info("what drafts was exchanged for a better one")

    def close(self) -> None:
        """Stop learning."""
        if self._learner is not None:
            self._learner.close()

    def _give_up(self, error: Exception) -> None:
        _LOG.error("learning failed and is off from now on; what drafts stays as it is", exc_info=error)
        self._learner = None
