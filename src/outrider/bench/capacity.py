"""The capacity model: replicas for a load and the cost of a million tokens, from the tokens per second of one replica.

If a replica is always busy, queues grow without limit. So only a share of its speed is planned for. The speed is measured
(``outrider bench``) or predicted (``outrider simulate``), and the answer is as good as that figure. Reading prompts takes time
too. ``replay.py`` simulates arriving and waiting requests, which checks the share.

    replicas = ceil(requests a second x (output / speed + prompt / prompt speed) / utilisation)
    cost of a million tokens = 1e6 x price / (3600 x utilisation x speed)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from outrider.core.errors import OptionError


@final
@dataclass(frozen=True)
class Capacity:
    """A load, and the price of a replica."""

    requests_per_second: float
    tokens_per_request: float
    utilisation: float = 0.7
    """Share of a replica's speed that is planned for."""
    price: float = 0.0
    """Price of one replica's hour, in any currency."""
    prompt_tokens: float = 0.0
    """Prompt tokens of a request, without those that a prefix cache saves."""

    def __post_init__(self) -> None:
        above = self.requests_per_second > 0 and self.tokens_per_request > 0 and self.price >= 0 and self.prompt_tokens >= 0
        if not (above and 0 < self.utilisation <= 1):
            raise OptionError(
                f"a load of {self.requests_per_second} requests/s of {self.prompt_tokens} and {self.tokens_per_request} tokens "
                f"at utilisation {self.utilisation} and price {self.price} is not valid; use numbers above 0 and a utilisation "
                "up to 1"
            )

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.tokens_per_request

    def replicas(self, speed: float, prompt_speed: float = math.inf) -> int:
        """Number of replicas, each of which writes ``speed`` tokens per second, or reads ``prompt_speed`` prompt tokens."""
        seconds = self.tokens_per_second / speed + self.requests_per_second * self.prompt_tokens / prompt_speed
        return max(1, math.ceil(seconds / self.utilisation - 1e-9))

    def million_tokens(self, speed: float) -> float:
        """Price of a million tokens on replicas of this speed."""
        return 1e6 * self.price / (3600 * self.utilisation * speed)

    def compared(self, plain: float, fast: float, prompt_speed: float = math.inf) -> str:
        """One line that compares plain decoding and speculation."""
        before, after = (self.replicas(speed, prompt_speed) for speed in (plain, fast))
        counts = f"{before} replicas plain, {after} with speculation"
        if not self.price:
            return counts
        prices = self.million_tokens(plain), self.million_tokens(fast)
        return f"{counts}; a million tokens {prices[0]:.2f} and {prices[1]:.2f} (saves {prices[0] - prices[1]:.2f})"
