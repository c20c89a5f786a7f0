"""Grouped speculative decoding: guesses are tested by the probability of their group.

A group of codes that look alike is more certain than any of them, so group probabilities of draft and target agree better than
those of single tokens. The rule ``gsd`` is the published one. It makes a new group around every guess, of the tokens next to it
in the order of p that are near in p and in the codebook. A rejection is followed by the token-wise residual. The rule
``gsd-partition`` keeps one partition of the codebook; after a rejection it draws a group from the residual, then a token of it.

    gsd            C(x): G/2 tokens on each side of x by p,  |p(v) - p(x)| < p_threshold,  |e_v - e_x|^2 < distance_threshold
                   keep x  with  min(1, p(C) / q(C));     rejection:  y ~ norm((p - q)+)
    gsd-partition  keep x  with  min(1, P(C) / Q(C)),  P and Q the group sums;     rejection:  C ~ norm((P - Q)+),  y ~ p(. | C)

So et al. 2025, arXiv 2508.07747. What is lost: with a partition the law of the GROUP is the target's own (rejection sampling
over groups). Within a kept group the token follows q instead of p. Dynamic groups are no partition: not even the law of groups
is kept. At temperature 0 ``gsd`` leaves greedy text alone; ``gsd-partition`` keeps guesses in the argmax's group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.neighbours import Neighbourhood
from outrider.acceptance.relaxed import RelaxedRule, at
from outrider.acceptance.residual import surplus
from outrider.core.errors import OptionError


@dataclass(frozen=True, eq=False)
class GroupedOptions:
    """Which tokens are in a guess's group."""

    group_size: int = 14
    """G: number of tokens considered around the guess in the order of p, half on each side; 0 is exact."""
    p_threshold: float = 0.15
    """Members' probabilities differ from the guess's by less than this."""
    distance_threshold: float = 0.5
    """Members' codes have a smaller squared distance from the guess's code than this."""
    codebook: Tensor | None = field(default=None, repr=False)
    """[V, D] a vector per token. Without it a token's position is its number."""

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 0:
            raise OptionError(f"group_size = {self.group_size} is not valid; use a whole number, 0 for the exact rule")
        for name, value in (("p_threshold", self.p_threshold), ("distance_threshold", self.distance_threshold)):
            if not value > 0:
                raise OptionError(f"{name} = {value} is not valid; use a number above 0")


@dataclass(frozen=True, eq=False)
class PartitionOptions:
    """How the codebook is divided."""

    num_groups: int = 64
    """Groups of the codebook, by k-means; as many as there are tokens is exact."""
    codebook: Tensor | None = field(default=None, repr=False)
    """[V, D] a vector per token. Without it a token's position is its number."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_groups, int) or self.num_groups < 1:
            raise OptionError(f"num_groups = {self.num_groups} is not valid; use a whole number from 1 on")


@final
class Grouped(RelaxedRule):
    """Grouped rule with a new group around every guess, as published."""

    def __init__(self, options: GroupedOptions | None = None) -> None:
        self.options = options or GroupedOptions()
        self._near = Neighbourhood(self.options.codebook)

    def odds(self, p: Tensor, q: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        members, is_in = self._members(p, guess)
        zero = torch.zeros((), dtype=p.dtype, device=p.device)
        return tuple(torch.where(is_in, law.gather(1, members), zero).sum(-1) for law in (p, q))  # pyright: ignore[reportReturnType]

    def owed(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        del guess
        return surplus(p, q)

    def _members(self, p: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """[M, G + 1] tokens around each guess in the order of p, and which of them are in its group."""
        half, vocab_size = self.options.group_size // 2, p.shape[1]
        order = p.argsort(dim=-1, stable=True)
        rank = (order == guess[:, None]).to(torch.int64).argmax(-1)
        places = rank[:, None] + torch.arange(-half, half + 1, device=p.device)
        members = order.gather(1, places.clamp(0, vocab_size - 1))
        is_in = (places >= 0) & (places < vocab_size)
        is_in &= (p.gather(1, members) - at(p, guess)[:, None]).abs() < self.options.p_threshold
        return members, is_in & (self._near.squared(guess, members, vocab_size) < self.options.distance_threshold)


@final
class GroupedPartition(RelaxedRule):
    """Grouped rule with one fixed partition of the codebook, exact on its groups."""

    def __init__(self, options: PartitionOptions | None = None) -> None:
        self.options = options or PartitionOptions()
        self._near = Neighbourhood(self.options.codebook)

    def groups(self, vocab_size: int, device: torch.device) -> Tensor:
        """[V] the number of each token's group."""
        return self._near.groups(self.options.num_groups, vocab_size, device)

    def odds(self, p: Tensor, q: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        of = self.groups(p.shape[1], p.device)
        return at(self._sums(p), of[guess]), at(self._sums(q), of[guess])

    def owed(self, p: Tensor, q: Tensor, guess: Tensor) -> Tensor:
        """The residual of each group, divided within the group in proportion to p."""
        del guess
        of, sums = self.groups(p.shape[1], p.device), self._sums(p)
        share = torch.where(sums > 0, surplus(sums, self._sums(q)) / sums, 0.0)
        return p * share[:, of]

    def near_best(self, judged: Tensor, guess: Tensor) -> Tensor:
        of = self.groups(judged.shape[1], judged.device)
        return of[judged.argmax(-1)] == of[guess]

    def _sums(self, law: Tensor) -> Tensor:
        """[M, groups] the probability of each group."""
        of = self.groups(law.shape[1], law.device)
        num_groups = min(self.options.num_groups, law.shape[1])
        return torch.zeros(len(law), num_groups, dtype=law.dtype, device=law.device).index_add_(1, of, law)
