"""How well each early exit of a model would have drafted, counted along text the model has verified.

At every verified position the exit after layer l predicts a *shadow token*, argmax head(norm(h_l)). It is compared with the
whole model's token there. Counts decay, so they follow the text. They give how often an exit is right, its confidence when
right and when wrong, and the exit and draft length with most tokens per layer run. (Entezari Zarch et al. 2025, DEL, arXiv
2504.05598.)

    alpha_l = matches / positions                      TPL(l, d) = (1 + alpha_l + ... + alpha_l^d) / (L + d l)
    tau_l = (mean sureness where right + mean sureness where wrong) / 2

The counts are a lasting memory: one object may serve all requests and outlive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from outrider.core.lasting_memory import LastingMemory


@dataclass
class _Tally:
    """Decayed counts and sums of one exit."""

    right: float = 0.0
    wrong: float = 0.0
    sure_right: float = 0.0
    sure_wrong: float = 0.0

    def fade(self, decay: float) -> None:
        self.right, self.wrong = decay * self.right, decay * self.wrong
        self.sure_right, self.sure_wrong = decay * self.sure_right, decay * self.sure_wrong


@dataclass(frozen=True)
class ExitChoice:
    """The exit and the draft length of a round."""

    exit: int
    depth: int
    """Guesses; 0 if drafting would not pay."""
    threshold: float
    """Drafting should end after a guess of this exit with lower confidence."""


@final
class ExitStatistics(LastingMemory):
    """Decayed counts of the exits after some layers of a model."""

    def __init__(self, exits: Sequence[int], num_layers: int, *, decay: float = 0.95) -> None:
        super().__init__()
        self.exits = tuple(exits)
        self.num_layers = num_layers
        self.decay = decay
        self.num_rounds = 0
        self._tallies = {layer: _Tally() for layer in self.exits}

    def clear(self) -> None:
        with self.lock:
            self.num_rounds = 0
            self._tallies = {layer: _Tally() for layer in self.exits}

    def learn(self, layer: int, right: Tensor, sure: Tensor) -> None:
        """Add an exit's shadow tokens [P]: which were right, and their confidence."""
        hits, wrong = right.double(), (~right).double()
        sums = [float(hits.sum()), float(wrong.sum()), float((hits * sure).sum()), float((wrong * sure).sum())]
        with self.lock:
            tally = self._tallies[layer]
            tally.fade(self.decay)
            tally.right, tally.wrong = tally.right + sums[0], tally.wrong + sums[1]
            tally.sure_right, tally.sure_wrong = tally.sure_right + sums[2], tally.sure_wrong + sums[3]

    def alpha(self, layer: int) -> float:
        """How often an exit is right; 1/2 while nothing is known."""
        tally = self._tallies[layer]
        return (tally.right + 0.5) / (tally.right + tally.wrong + 1)

    def threshold(self, layer: int) -> float:
        """The middle between the mean confidences of right and of wrong tokens. Without right ones it is 1, without wrong
        ones 0."""
        tally = self._tallies[layer]
        when_right = tally.sure_right / tally.right if tally.right > 0 else 1.0
        when_wrong = tally.sure_wrong / tally.wrong if tally.wrong > 0 else 0.0
        return (when_right + when_wrong) / 2

    def tokens_per_layer(self, layer: int, depth: int) -> float:
        """Expected tokens of a round, divided by the layers it runs."""
        alpha = self.alpha(layer)
        return sum(alpha**power for power in range(depth + 1)) / (self.num_layers + depth * layer)

    def choose(self, max_depth: int) -> ExitChoice:
        """The exit and the length with most tokens per layer."""
        with self.lock:
            rated = [
                (self.tokens_per_layer(layer, depth), -depth, -layer) for layer in self.exits for depth in range(max_depth + 1)
            ]
            _, depth, layer = max(rated)
            return ExitChoice(-layer, -depth, self.threshold(-layer))
