"""Learning while serving: what requests taught, and a better draft model in the place of the old one between two rounds.

The learner (``engine/exchange.py``; ``outrider serve --learn`` makes one that distils) decides when a draft is better, on
requests it never learned from. Here it is told what ended, asked between rounds, and kept from doing harm: if it fails, it is
not asked again, and nobody who is being served notices. No text changes by it (``docs/lossless.md``), only its speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from outrider.core.interfaces import Target
from outrider.core.request import RequestState
from outrider.engine.exchange import Learner
from outrider.server.metrics import Metrics

_LOG = logging.getLogger("outrider.server")


@final
class Lessons:
    """A learner in a server; without one, nothing happens."""

    def __init__(self, learner: Learner | None, metrics: Metrics, *, swap: Callable[[Target], None]) -> None:
        """``swap`` puts a new draft model into service."""
        self._learner, self._metrics, self._swap = learner, metrics, swap

    @property
    def is_on(self) -> bool:
        return self._learner is not None

    def ended(self, state: RequestState) -> None:
        """A request has its whole answer."""
        if self._learner is None:
            return
        try:
            self._learner.observe(state.request.prompt_ids, state.output_ids, state.origins)
        except Exception as error:
            self._give_up(error)

    def between_rounds(self) -> None:
        """Put a better draft into service, if there is one."""
        if self._learner is None:
            return
        try:
            better = self._learner.maybe_update()
        except Exception as error:
            self._give_up(error)
            return
        if better is not None:
            self._swap(better)
            self._metrics.draft_swaps.inc()
            _LOG.info("the draft model was exchanged for a better one")

    def _give_up(self, error: Exception) -> None:
        _LOG.error("learning failed and is off from now on; the draft model stays as it is", exc_info=error)
        self._learner = None
