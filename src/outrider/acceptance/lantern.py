"""LANTERN: the probabilities of similar image tokens count for a guess. LOSSY.

The probabilities of the guess's nearest codes are added to its own before the test, as far as a bound allows. LANTERN bounds
what is added by delta; LANTERN++ by (lambda - 1) times the guess's own probability, so an unlikely guess gains little.

    c_j(x) = p summed over the j nearest codes of x, j <= k
    lantern     p'(x) = p(x) + the largest c_j(x) <= delta
    lantern++   p'(x) = p(x) + the largest c_j(x) <= (lambda - 1) p(x)
    keep x  iff  u q(x) < p'(x);     rejection:  y ~ norm((p - q')+),  q' = q without the k neighbours of x, if any were used
    temperature 0:  keep x  iff  p'(x) is above every other probability of the softmax

Jang et al. 2025, arXiv 2410.03355; Park et al. 2025, arXiv 2502.06352; the residual is that of the released code. What is lost:
delta bounds how far p' of ONE guess is from p. Every guess has its own p', so the emitted law is not within delta of p. For
example, the target is uniform over 512 codes and the draft over ten of them: every guess is kept, and the total variation is
0.98. ``measure`` computes the loss.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.neighbours import Neighbourhood
from outrider.acceptance.relaxed import RelaxedRule, at
from outrider.acceptance.residual import surplus
from outrider.core.errors import OptionError


@dataclass(frozen=True, eq=False)
class LanternOptions:
    """How many neighbours count for a guess, and how much they may add."""

    num_neighbours: int = 10
    """k: number of nearest codes considered; 0 is exact."""
    lantern_delta: float = 0.05
    """delta: most probability added to a guess's own; 0 is exact."""
    codebook: Tensor | None = field(default=None, repr=False)
    """[V, D] a vector per token. Without it a token's position is its number."""

    def __post_init__(self) -> None:
        _check_count(self.num_neighbours)
        if not 0 <= self.lantern_delta <= 1:
            raise OptionError(f"lantern_delta = {self.lantern_delta} is not valid; use 0 (lossless) to 1")


@dataclass(frozen=True, eq=False)
class LanternPlusOptions:
    """How many neighbours count for a guess, and by what factor its probability may grow."""

    num_neighbours: int = 10
    """k: number of nearest codes considered; 0 is exact."""
    lantern_lambda: float = 2.0
    """lambda: largest factor by which the guess's own probability may grow; 1 is exact."""
    codebook: Tensor | None = field(default=None, repr=False)
    """[V, D] a vector per token. Without it a token's position is its number."""

    def __post_init__(self) -> None:
        _check_count(self.num_neighbours)
        if not self.lantern_lambda >= 1:
            raise OptionError(f"lantern_lambda = {self.lantern_lambda} is not valid; use 1 (lossless) or more")


def _check_count(count: int) -> None:
    if not isinstance(count, int) or count < 0:
        raise OptionError(f"num_neighbours = {count} is not valid; use a whole number, 0 for the exact rule")


class NeighbourRule(RelaxedRule):
    """The acceptance test with the neighbours' probabilities added. A rule says how much may be added."""

    def __init__(self, num_neighbours: int, codebook: Tensor | None) -> None:
        self._num_neighbours = num_neighbours
        self._near = Neighbourhood(codebook)

    @abstractmethod
    def bound(self, own: Tensor) -> Tensor:
        """[M] the most that may be added to a guess whose own probability is ``own`` [M]."""

    def odds(self, p: Tensor, q: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        return at(p, guess) + self._added(p, guess), at(q, guess)

    def owed(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        near, sums = self._sums(p, guess)
        used = (sums <= self.bound(at(p, guess))[:, None]).any(-1, keepdim=True)
        without = q.scatter(1, near, 0.0)
        return surplus(p, torch.where(used, without, q))

    def near_best(self, judged: Tensor, guess: Tensor) -> Tensor:
        others = judged.scatter(1, guess[:, None], -torch.inf)
        relaxed = at(judged, guess) + self._added(judged, guess) > others.amax(-1)
        return relaxed | (judged.argmax(-1) == guess)

    def _added(self, p: Tensor, guess: Tensor) -> Tensor:
        _, sums = self._sums(p, guess)
        if sums.shape[1] == 0:
            return torch.zeros_like(p[:, 0])
        return torch.where(sums <= self.bound(at(p, guess))[:, None], sums, 0.0).amax(-1)

    def _sums(self, p: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """[M, k] the neighbours of each guess, and [M, k] the cumulative probabilities of the first j of them."""
        near = self._near.nearest(self._num_neighbours, p.shape[1], p.device)[guess]
        return near, p.gather(1, near).cumsum(-1)


@final
class Lantern(NeighbourRule):
    """Neighbours add at most delta."""

    def __init__(self, options: LanternOptions | None = None) -> None:
        self.options = options or LanternOptions()
        super().__init__(self.options.num_neighbours, self.options.codebook)

    def bound(self, own: Tensor) -> Tensor:
        return torch.full_like(own, self.options.lantern_delta)


@final
class LanternPlus(NeighbourRule):
    """Neighbours add at most (lambda - 1) times the guess's own probability."""

    def __init__(self, options: LanternPlusOptions | None = None) -> None:
        self.options = options or LanternPlusOptions()
        super().__init__(self.options.num_neighbours, self.options.codebook)

    def bound(self, own: Tensor) -> Tensor:
        return (self.options.lantern_lambda - 1) * own
