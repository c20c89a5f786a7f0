"""How many requests fill a replica: measured from its rounds, for scaling by goodput.

Goodput is emitted tokens per second of a round. It rises with the rows that share a round until passes are bound by
multiplying, and speculation reaches that point with fewer rows than plain decoding. A fixed number of requests per replica
would ignore both. So goodput is measured for every number of rows, and a replica is full at the smallest number with nearly the
best goodput.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import final

_NEARLY = 0.9
"""Share of the best goodput that counts as full."""
_KEPT = 0.98
"""Decay of earlier rounds of the same size, because texts and drafts change."""


@final
class GoodputCurve:
    """Tokens per second by rows of a round."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def add(self, num_rows: int, num_tokens: float, seconds: float) -> None:
        """Count a round. Modifies the curve."""
        if num_rows and seconds > 0:
            tokens, spent = self._seen.get(num_rows, (0.0, 0.0))
            self._seen[num_rows] = (_KEPT * tokens + num_tokens, _KEPT * spent + seconds)

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by rows."""
        return {rows: tokens / seconds for rows, (tokens, seconds) in sorted(self._seen.items())}

    def enough(self, default: float) -> float:
        """Number of requests that fill this replica; at least ``default`` while goodput still rises with the most rows
        seen."""
        rates = self.rates
        if not rates:
            return default
        best, most = max(rates.values()), max(rates)
        fewest = min(rows for rows, rate in rates.items() if rate >= _NEARLY * best)
        return float(fewest) if fewest < most else max(default, float(most))


def replicas_wanted(num_requests: float, enough: Collection[float], default: float) -> int:
    """Number of replicas for this many running and waiting requests. Each counts as full at the mean of ``enough``."""
    full = sum(enough) / len(enough) if enough else default
    return max(1, math.ceil(num_requests / max(full, 1.0)))
