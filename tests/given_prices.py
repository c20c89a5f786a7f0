"""Costs of rounds that tests are given. Measuring takes time for every model, and what is found depends on the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.prices import Prices, PriceSource

PASSES = ((1, ((0.0, 1.0e-3), (63.0, 2.0e-3))),)
DRAFTS = ((1, ((1.0, 0.1e-3), (8.0, 0.8e-3))),)
"""Guesses are nearly free in a pass, and drafting one takes a tenth of a pass."""


@final
@dataclass(frozen=True)
class Given(PriceSource):
    """The same prices for every model. As with measured ones, a drafter that remembers or never guesses has none."""

    has_drafts: bool

    def read(self, nodes_of: Callable[[int], int]) -> Prices:
        return Prices(PASSES, DRAFTS if self.has_drafts else ())

    def doubt(self) -> None:
        """Real rounds may take what they take."""


def expect_given(method: Method, target: Target, label: Mapping[str, Any], graphs_of: Any, prices: Any) -> None:
    """In the place of ``expect_prices``."""
    method.policy.expect(Given(not (method.drafter.memories or method.drafter.never_guesses)))
