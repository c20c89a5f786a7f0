"""Targets that can draft by themselves: a whole chain or tree of guesses in one call.

A draft model whose passes run outside Python offers this, so that a chain costs one call instead of one per guess.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.plan import Plan
from outrider.core.rng import Noise
from outrider.core.tree import TokenTree
from outrider.core.truncation import Tempering

_MOST_SCORED = 16
"""Most tokens that one pass reads and scores, though the last scores alone are wanted."""


@dataclass(frozen=True)
class TreeSearch:
    """How a best-first tree is looked for (see drafters/model/best_first.py)."""

    width: int
    """Nodes fed per level."""
    num_children: int
    """Candidates looked at below each of them."""
    tau: float
    """How far the model's logits are from the target's."""


class Guesses(NamedTuple):
    """Chains that a model guessed in one call."""

    tokens: Tensor
    """[B, longest], padded with zeros."""
    depths: Sequence[int]
    """Guesses of each row."""
    beliefs: Sequence[Sequence[float]] | None
    """The model's confidence in each guess, where the plan has a ``doubt``."""


class GuessingTarget(Target, ABC):
    """A target that can run ahead by itself: a whole chain or tree of guesses in one call, for drafting.

    Both feed ``rows[b]`` first and commit it. Guesses are ranked by logits + temperature * target noise of their output
    position, among those that the cuts leave. None means that it cannot run ahead now, and that nothing has changed.
    """

    @abstractmethod
    def guess(
        self,
        rows: Sequence[Sequence[int]],
        cache: Cache,
        *,
        plan: Plan,
        tempering: Tempering,
        noise: Noise,
    ) -> Guesses | None:
        """The best guess after the best guess, as often as planned; commits all of them but the last.

        The belief in a guess is its share in the softmax of what guesses are ranked by: how far it is ahead of the others
        under the noise that the target's choice will be made with."""

    @abstractmethod
    def guess_tree(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, search: TreeSearch, plan: Plan, tempering: Tempering, noise: Noise
    ) -> tuple[TokenTree, Tensor] | None:
        """The best trees within the plan, root first, and [B, N] the number of each node among those fed after the root, from
        1, or 0. What was fed after the root is left uncommitted."""


def guess_by_steps(
    model: Target,
    rows: Sequence[Sequence[int]],
    cache: Cache,
    *,
    depths: Sequence[int],
    temperatures: Sequence[float],
    noise: Noise,
    vocab_size: int,
) -> Guesses:
    """What ``GuessingTarget.guess`` returns, from a model that cannot run ahead by itself: a pass for every guess. Guesses are
    not cut, and nothing is believed of them. A row without guesses is given no tokens."""
    device, found = model.device, list[Tensor]()
    if max(map(len, rows)) > _MOST_SCORED:
        model.prefill([row[:-1] for row in rows], cache)
        rows = [row[-1:] for row in rows]
    longest = max(1, *map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    last = torch.tensor([max(len(row) - 1, 0) for row in rows], device=device)
    warmth = torch.tensor(temperatures, device=device)[:, None]
    fed = [range(len(row)) for row in rows]
    sizes = [max(1, len(row)) for row in rows]
    for depth in range(max(depths)):
        logits = model.score(TokenTree.chain(tokens, sizes), cache).logits[..., :vocab_size].float()
        cache.commit(fed)
        ranked = logits[torch.arange(len(rows), device=device), last]
        if any(temperatures):
            places = torch.full((len(rows), 1), depth, device=device)
            ranked = ranked + warmth * noise.target_gumbel(places, vocab_size)[:, 0]
        found.append(ranked.argmax(-1))
        tokens, last, sizes = found[-1][:, None], torch.zeros_like(last), [1] * len(rows)
        fed = [range(int(depth + 1 < limit)) for limit in depths]
    return Guesses(torch.stack(found, 1).cpu(), list(depths), None)
