"""The five interfaces of the engine (``core/interfaces.py``) for tokens that are vectors. The sentence is the same:

    a DRAFTER proposes a chain of paths, the TARGET scores it in one pass, a RULE walks it,
    the CACHES commit the accepted tokens, a PLAN says how much is drafted next.

A score is a condition instead of logits: the input of a diffusion head that draws the next token. Only both together are a law.
As in the engine, the caches hold everything but the last committed token, which is the root of the next chain. The class stands
at place 0 and is the first root.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.plan import Plan
from outrider.images.continuous.paths import Chain, Paths, Schedule


class ContinuousTarget(ABC):
    """A causal model over continuous tokens with a diffusion head. A draft model is one too."""

    schedule: Schedule
    num_tokens: int
    """L: tokens of one image."""
    dim: int
    num_classes: int
    dtype: torch.dtype = torch.float32

    @abstractmethod
    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache of ``batch_size`` rows."""

    @abstractmethod
    def score(self, nodes: Tensor, labels: Tensor, cache: Cache) -> Tensor:
        """[B, N, H] the condition of the token after each node of chains [B, N, D], in one pass. Writes the nodes after each
        row's committed tokens; commits nothing. The node at place 0 is the class ``labels[b]``; its vector is not read."""

    @abstractmethod
    def chain(self, conditions: Tensor) -> Chain:
        """The denoiser of M tokens under conditions [M, H]."""

    def conditions(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[B, N + 1, H] the condition of the next token after every prefix of [B, N, D], computed in one pass."""
        root = tokens.new_zeros(len(tokens), 1, self.dim)
        return self.score(torch.cat([root, tokens], 1), labels, self.new_cache(len(tokens)))


@final
@dataclass(frozen=True, eq=False)
class PathContext:
    """What a drafter may know when it proposes: committed tokens, the classes, and the random numbers."""

    tokens: Tensor
    """[B, L + 1, D] the class's entry, committed tokens, then unused entries."""
    lengths: Sequence[int]
    """Committed entries of each row, the class included. The last one is the root."""
    labels: Tensor
    """[B]"""
    chance: torch.Generator

    @property
    def roots(self) -> Tensor:
        """[B, D]"""
        return self.tokens[torch.arange(len(self.tokens)), torch.tensor(self.lengths) - 1]

    def without_guesses(self) -> PathDraft:
        return PathDraft(self.roots[:, None], [0] * len(self.lengths))


@final
@dataclass(frozen=True, eq=False)
class PathGuesses:
    """M drafted tokens of all rows: each with its row, its depth after the root (from 0), and its path."""

    rows: Tensor
    depths: Tensor
    paths: Paths
    noise: Tensor
    """[T + 1, M, D] the random numbers from which the draft made the paths."""
    chain: Chain
    """q: the draft's denoiser of these tokens."""


@final
@dataclass(frozen=True, eq=False)
class PathDraft:
    """A chain per row."""

    nodes: Tensor
    """[B, N + 1, D] the root and the guesses after it. Entries past a row's depth are arbitrary."""
    depth: Sequence[int]
    """Guesses of each row."""
    guesses: PathGuesses | None = None
    """The guesses; None if no row has any."""


class PathDrafter(ABC):
    """Proposes chains of paths."""

    @abstractmethod
    def start(self, num_rows: int) -> Cache | None:
        """The state of new rows, whose class alone is known: a cache, or nothing."""

    @abstractmethod
    def propose(self, state: Cache | None, context: PathContext, plan: Plan) -> PathDraft:
        """A chain per row within a plan that has guesses. The cache may hold guesses until ``observe``."""

    @abstractmethod
    def observe(self, state: Cache | None, lengths: Sequence[int]) -> None:
        """Keep what was accepted: rows now have ``lengths`` committed tokens."""

    @final
    def asked(self, state: Cache | None, context: PathContext, plan: Plan) -> PathDraft:
        """The proposal. If the plan has no guesses, the drafter is not asked."""
        return self.propose(state, context, plan) if any(plan.max_depth) else context.without_guesses()


@final
@dataclass(frozen=True, eq=False)
class PathLaw:
    """p: the target's denoisers after every node of a scored draft."""

    target: ContinuousTarget
    conditions: Tensor
    """[B, N + 1, H]"""

    def after(self, rows: Tensor, nodes: Tensor) -> Chain:
        """The denoisers of the tokens after M nodes."""
        return self.target.chain(self.conditions[rows, nodes])


@final
@dataclass(frozen=True, eq=False)
class PathVerdict:
    """The outcome of a walk."""

    num_accepted: Tensor
    """[B]"""
    next_token: Tensor
    """[B, D] the target's own token after the accepted ones."""
    rejected: Tensor
    """[B] whether a guess was rejected there. If not, the next token is a bonus."""
    num_paths: Tensor
    """[B] target paths that were run one after the other: for guesses up to the first rejected one, and for next tokens."""
