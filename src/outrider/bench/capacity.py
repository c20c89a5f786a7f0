"""The capacity model: replicas for a load, and what a million tokens cost, from tokens per second of one replica.

A replica that is busy all the time lets requests wait for ever, so only a share of its speed is planned for. Everything else
is division. The speed is a measured one (``outrider bench``), or a projection (``outrider simulate``): the answer is as good.

    replicas = ceil(load / (utilisation x speed)),        cost of a million tokens = 1e6 x price / (3600 x utilisation x speed)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from outrider.core.errors import OptionError


@final
@dataclass(frozen=True)
class Capacity:
    """A load, and what a replica costs."""

    requests_per_second: float
    tokens_per_request: float
    utilisation: float = 0.7
    """Share of a replica's speed that is planned for."""
    price: float = 0.0
    """Of one replica's hour, in any currency."""

    def __post_init__(self) -> None:
        if not (self.requests_per_second > 0 and self.tokens_per_request > 0 and 0 < self.utilisation <= 1 and self.price >= 0):
            raise OptionError(
                f"a load of {self.requests_per_second} requests/s of {self.tokens_per_request} tokens at utilisation "
                f"{self.utilisation} and price {self.price} is not valid; use numbers above 0, and a utilisation up to 1"
            )

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.tokens_per_request

    def replicas(self, speed: float) -> int:
        """For a replica of ``speed`` tokens per second."""
        return max(1, math.ceil(self.tokens_per_second / (self.utilisation * speed) - 1e-9))

    def million_tokens(self, speed: float) -> float:
        """Price of a million tokens on replicas of this speed."""
        return 1e6 * self.price / (3600 * self.utilisation * speed)

    def compared(self, plain: float, fast: float) -> str:
        """One line: plain decoding beside speculation."""
        counts = f"{self.replicas(plain)} replicas plain, {self.replicas(fast)} with speculation"
        if not self.price:
            return counts
        before, after = self.million_tokens(plain), self.million_tokens(fast)
        return f"{counts}; a million tokens {before:.2f} and {after:.2f} (saves {before - after:.2f})"
