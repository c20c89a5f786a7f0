"""Rounds that stay on the device: what a captured round reads and writes, and drafters that can be part of one.

A ``Frame`` is a batch as tensors at addresses that stay, so that a graph captured once serves every request that stands in its
slots: tokens, lengths, seeds and temperatures are data. A ``DeviceDrafter`` guesses from a frame without asking the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.device_sampling import Shaping, Stages


@dataclass(frozen=True, eq=False)
class Frame:
    """A batch of B slots. A slot whose length has reached its limit stands still: rounds do not change it."""

    tokens: Tensor
    """[B, S] int64 committed tokens, prompt first."""
    lengths: Tensor
    """[B] int64 how many; the last one is the root of the next tree."""
    limits: Tensor
    """[B] int64 length at which a slot stands still."""
    prompt_lens: Tensor
    """[B] int64, so that the output position is ``lengths - prompt_lens``."""
    seeds: Tensor
    """[B] int64."""
    temperatures: Tensor
    """[B] float32, 0 for greedy."""
    pages: Tensor | None = None
    """[B, P] int32 pages in which the target keeps the slots' tokens, for drafters that read them; None where it has none."""
    shaping: Shaping | None = None
    """The rest of the slots' sampling parameters; None until somebody asks for more than a temperature."""
    stages: Stages = Stages.TEMPERATURE
    """How much of the sampler a round of this frame computes."""
    has_logprobs: bool = False
    """Whether a round of this frame reports log-probabilities."""
    is_constrained: bool = False
    """Whether grammars forbid tokens in a round of this frame. Its guesses may be changed after they were drafted."""

    @staticmethod
    def empty(batch_size: int, capacity: int, device: torch.device) -> Frame:
        """Slots that stand still, each with two tokens so that every index a round computes is valid."""

        def column(value: int) -> Tensor:
            return torch.full((batch_size,), value, dtype=torch.int64, device=device)

        tokens = torch.zeros(batch_size, capacity, dtype=torch.int64, device=device)
        return Frame(tokens, column(2), column(0), column(2), column(0), torch.zeros(batch_size, device=device))

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]


PIECE_LEN = 32
"""Prompt tokens of a piece: with the query heads that share a key head, a whole tile of attention."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """R pieces of prompts that a round reads beside its trees. A slot stands still until its prompt is read, and is told its
    length at once: what a round writes for it lies behind the prompt."""

    slots: Tensor
    """[R] int64 whose text a piece is of; -1 for a piece that nobody needs."""
    starts: Tensor
    """[R] int64 tokens of the text before it."""

    def __len__(self) -> int:
        return self.slots.shape[0]

    def columns(self) -> Tensor:
        """[R, 32] positions in the text. Those behind the prompt hold anything: they are written again when they are known."""
        return self.starts[:, None] + torch.arange(PIECE_LEN, device=self.starts.device)

    def tokens(self, frame: Frame, *, shift: int = 0) -> Tensor:
        """[R, 32] of the frame's texts, ``shift`` places later."""
        return frame.tokens[self.slots.clamp(min=0)[:, None], self.columns() + shift]

    def of_slots(self, values: Tensor, spare: Tensor) -> Tensor:
        """[R, ..] the values [B, ..] of the pieces' slots; ``spare`` for a piece that nobody needs."""
        needed = (self.slots >= 0).view(-1, *[1] * (values.dim() - 1))
        return torch.where(needed, values[self.slots.clamp(min=0)], spare)


@dataclass(frozen=True, eq=False)
class SlotTrees:
    """The shapes of the slots' trees, at addresses that stay. Node 0 is the root; parents come before their children."""

    parents: Tensor
    """[B, N] int64, -1 for the root."""
    depths: Tensor
    """[B, N] int32."""
    words: Tensor
    """[B, N, W] int64, bit j % 64 of word j // 64: node j is an ancestor or itself."""
    paths: Tensor
    """[B, N, P] int32 ancestor-or-self at every depth; beyond a node's own, anything in the tree."""


@dataclass(frozen=True)
class CapturedShape:
    """The drafts that a policy may plan. A round is captured once for each, so they are known beforehand."""

    guesses: Mapping[int, int]
    """Guesses of a tree by guesses along a path."""

    @property
    def depth(self) -> int:
        """Most guesses along a path."""
        return max(self.guesses, default=0)

    @property
    def varies(self) -> bool:
        """The length changes from round to round."""
        return len(self.guesses) > 1

    def within(self, max_depth: int | None) -> CapturedShape:
        """Without the drafts that reach further; the shortest of them is cut where all do."""
        if max_depth is None or not self.guesses:
            return self
        kept = {depth: count for depth, count in self.guesses.items() if depth <= max_depth}
        return CapturedShape(kept or {max_depth: self.guesses[min(self.guesses)]})


@dataclass(frozen=True, eq=False)
class Texts:
    """Requests that take slots, and what the target has read of them."""

    slots: Sequence[int]
    rows: Sequence[Sequence[int]]
    """Their tokens."""
    features: Sequence[Tensor] | None = None
    """The target's tapped states [n, F] of all tokens but the last; None: who wants them asks the target again."""


class DeviceDrafter(ABC):
    """Guesses chains or trees inside a captured round. ``depth`` is the number of guesses along a path."""

    max_depth: int | None = None
    """Most guesses along a path; None for any number."""
    taps: tuple[int, ...] = ()
    """Target layers whose states it reads."""

    @property
    @abstractmethod
    def version(self) -> Hashable:
        """Changes when memory that a captured round points to has moved."""

    @abstractmethod
    def seat(self, texts: Texts, *, batch_size: int) -> None:
        """Requests with these texts take their slots (of ``batch_size``)."""

    @abstractmethod
    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        """As ``seat``, for requests whose prompts the next rounds read, piece by piece (``read``)."""

    @abstractmethod
    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        """Read the tokens of ``rows`` beyond ``known`` that rounds without guesses have added."""

    @abstractmethod
    def fits(self, capacity: int) -> bool:
        """Whether this drafter can follow a text of this many tokens."""

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        """Whether there is memory for the texts of slots to reach so many tokens each."""
        del reaches, batch_size
        return True

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        """The texts of slots may reach so many tokens each in the next rounds."""
        del reaches, batch_size

    @abstractmethod
    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The requests of these slots, of ``old_size``, take the first slots of ``new_size``."""

    @abstractmethod
    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        """The requests of these slots have left; give back what they held."""

    @abstractmethod
    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        """Fill columns 1.. of ``nodes`` [B, N] with guesses; column 0 holds the roots. Must not wait for the device."""

    def read(self, frame: Frame, pieces: Pieces, features: Tensor | None) -> None:
        """Part of a captured round: read pieces of prompts, whose tapped states are ``features`` [R, 32, F]."""
        del frame, pieces, features

    def num_nodes(self, depth: int) -> int:
        """Nodes of what ``propose`` guesses, the root included."""
        return depth + 1

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        """The shapes of what ``propose`` guesses for so many slots: fixed, or written by it. None for chains."""
        del batch_size, depth
        return None

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        """After a round: the tapped states [B, N, F] of its nodes, side by side. ``before`` [B] is where the root was; ``path``
        [B, 2 + D] says so too, then how many nodes of the tree were accepted, and which; None for chains."""
        del frame, before, features, path


def followed(features: Tensor, path: Tensor | None) -> Tensor:
    """[B, 1 + D, F] of the root and the accepted nodes, in order, from those of all nodes [B, N, F]; behind them, anything.
    ``path`` as in ``DeviceDrafter.take``."""
    if path is None:
        return features
    steps = torch.arange(path.shape[1] - 2, device=path.device)
    accepted = torch.where(steps < path[:, 1:2], path[:, 2:], 0)
    index = torch.cat([torch.zeros_like(accepted[:, :1]), accepted], 1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
