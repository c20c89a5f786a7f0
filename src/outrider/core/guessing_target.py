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
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree

_MOST_SCORED = 16
"""Most tokens that one pass may both read and score when only the last scores are wanted."""


@dataclass(frozen=True)
class TreeSearch:
    """Parameters of a best-first tree search (see drafters/model/best_first.py)."""

    width: int
    """Nodes fed per level."""
    num_children: int
    """Candidate children considered for each of them."""
    tau: float
    """Assumed distance between this model's logits and the target's."""


class Guesses(NamedTuple):
    """Chains that a model guessed in one call."""

    tokens: Tensor
    """[B, longest], padded with zeros."""
    depths: Sequence[int]
    """Number of guesses in each row."""
    beliefs: Sequence[Sequence[float]] | None
    """The model's confidence in each guess, where the plan has a ``doubt``."""


class GuessingTarget(Target, ABC):
    """A target that can draft a whole chain or tree in one call.

    Both methods first feed ``rows[b]`` and commit it. Guesses are ranked by logits + temperature * target noise of
    their output position, after truncation. None means that the target cannot draft now; nothing has changed then.
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
        """Draft a chain greedily, as long as planned. Commits all guesses but the last.

        The confidence in a guess is its softmax probability under the scores that rank guesses: logits plus target
        noise.
        """

    @abstractmethod
    def guess_tree(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, search: TreeSearch, plan: Plan, tempering: Tempering, noise: Noise
    ) -> tuple[TokenTree, Tensor] | None:
        """Draft the best trees within the plan, root first. Also returns [B, N]: each node's number among those fed
        after the root, counted from 1, or 0 if it was not fed. Nodes fed after the root stay uncommitted."""


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
    """``GuessingTarget.guess`` for a model without it: one pass per guess. Guesses are not truncated and have no
    confidence. A row without guesses is given no tokens."""
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
