"""Rounds that stay on the device: what a captured round reads and writes, and drafters that can be part of one.

A ``Frame`` is a batch in tensors with fixed addresses. A graph captured once then serves every request in its slots:
tokens, lengths, seeds and temperatures are data. A ``DeviceDrafter`` guesses from a frame without asking the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.device_sampling import Shaping, Stages


@dataclass(frozen=True, eq=False)
class Frame:
    """A batch of B slots. A slot whose length has reached its limit is idle: rounds do not change it."""

    tokens: Tensor
    """[B, S] int64 committed tokens, prompt first."""
    lengths: Tensor
    """[B] int64 number of committed tokens. The last one is the root of the next tree."""
    limits: Tensor
    """[B] int64 length at which a slot becomes idle."""
    prompt_lens: Tensor
    """[B] int64 prompt lengths. The output position is ``lengths - prompt_lens``."""
    seeds: Tensor
    """[B] int64."""
    temperatures: Tensor
    """[B] float32, 0 for greedy."""
    pages: Tensor | None = None
    """[B, P] int32 KV-cache pages of each slot, for drafters that read the target's cache; None without a paged
    cache."""
    shaping: Shaping | None = None
    """The slots' sampling parameters beside temperature; None until a request needs more than a temperature."""
    stages: Stages = Stages.TEMPERATURE
    """How much of the sampler a round of this frame computes."""
    has_logprobs: bool = False
    """Whether a round of this frame reports log-probabilities."""
    is_constrained: bool = False
    """Whether grammars forbid tokens in a round of this frame. Guesses may then be replaced after drafting."""

    @staticmethod
    def empty(batch_size: int, capacity: int, device: torch.device) -> Frame:
        """Idle slots. Each has two tokens, so that every index a round computes is valid."""

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
class PromptPieces:
    """R prompt pieces that a round reads beside its trees. A slot is idle until its prompt is read. Its length is set
    at once, so that whatever a round writes for it lies after the prompt."""

    slots: Tensor
    """[R] int64 slot of each piece; -1 for an unused piece."""
    starts: Tensor
    """[R] int64 position of each piece's first token."""

    def __len__(self) -> int:
        return self.slots.shape[0]

    def columns(self) -> Tensor:
        """[R, 32] positions in the text. Entries past the prompt are arbitrary; they are overwritten once they are
        known."""
        return self.starts[:, None] + torch.arange(PIECE_LEN, device=self.starts.device)

    def tokens(self, frame: Frame, *, shift: int = 0) -> Tensor:
        """[R, 32] tokens of the pieces, ``shift`` positions later."""
        return frame.tokens[self.slots.clamp(min=0)[:, None], self.columns() + shift]

    def of_slots(self, values: Tensor, spare: Tensor) -> Tensor:
        """[R, ..] values of the pieces' slots, from [B, ..]; ``spare`` for an unused piece."""
        needed = (self.slots >= 0).view(-1, *[1] * (values.dim() - 1))
        return torch.where(needed, values[self.slots.clamp(min=0)], spare)


@dataclass(frozen=True, eq=False)
class SlotTrees:
    """The shapes of the slots' trees, in tensors with fixed addresses. Node 0 is the root; parents precede their
    children."""

    parents: Tensor
    """[B, N] int64, -1 for the root."""
    depths: Tensor
    """[B, N] int32."""
    words: Tensor
    """[B, N, W] int64 bit masks. Bit j % 64 of word j // 64 says that node j is an ancestor of the node, or the node
    itself."""
    paths: Tensor
    """[B, N, P] int32 ancestor-or-self at every depth. Entries past a node's own depth are arbitrary nodes of the
    tree."""


@dataclass(frozen=True)
class CapturedShape:
    """The draft lengths a policy may plan. One round is captured for each, so they must be known in advance."""

    guesses: Mapping[int, int]
    """Number of guesses in a tree, by draft length."""

    @property
    def depth(self) -> int:
        """Longest draft length."""
        return max(self.guesses, default=0)

    @property
    def varies(self) -> bool:
        """Whether the draft length changes from round to round."""
        return len(self.guesses) > 1

    def within(self, max_depth: int | None) -> CapturedShape:
        """This shape without draft lengths above ``max_depth``. If all exceed it, the shortest one is cut to it."""
        if max_depth is None or not self.guesses:
            return self
        kept = {depth: count for depth, count in self.guesses.items() if depth <= max_depth}
        return CapturedShape(kept or {max_depth: self.guesses[min(self.guesses)]})


@dataclass(frozen=True, eq=False)
class Texts:
    """Requests that take slots, with the target's states of their prompts."""

    slots: Sequence[int]
    rows: Sequence[Sequence[int]]
    """Their tokens."""
    features: Sequence[Tensor] | None = None
    """The target's tapped states [n, F] of all tokens but the last. None: a drafter that wants them runs the target
    again."""


@dataclass(frozen=True, eq=False)
class LateTexts:
    """Requests in slots that ran rounds without drafts, so that the drafter is behind."""

    slots: Sequence[int]
    rows: Sequence[Sequence[int]]
    """Their tokens."""
    known: Sequence[int]
    """Number of tokens that the drafter has certainly read."""
    added: Sequence[int]
    """Number of tokens that rounds without drafts have added."""


class PairedRows(ABC):
    """How a round makes one slot of two rows of a model. The second row reads other tokens; both share one choice."""

    @abstractmethod
    def second(self, tokens: Tensor) -> Tensor:
        """The tokens that the second row reads when the first one reads ``tokens``."""

    @abstractmethod
    def mixed(self, logits: Tensor) -> Tensor:
        """[B, N, V] of slots, from those of first and second rows in turn [2B, N, V]."""

    @abstractmethod
    def held(self, cache: Any) -> Any:
        """The model's own cache with both rows of each request, out of the pair's."""


class DeviceDrafter(ABC):
    """Guesses chains or trees inside a captured round. ``depth`` is the number of guesses along a path."""

    least_len: int = 2
    """Tokens of a text that its first pass needs."""
    max_depth: int | None = None
    """Longest draft length; None for no limit."""
    taps: tuple[int, ...] = ()
    """Target layers whose states it reads."""
    text_sizes: Sequence[int] = tuple(1 << power for power in range(10))
    """Tokens of texts that run, when they take a slot one by one, every kernel that any text may run."""
    most_late: int | None = None
    """Rounds without drafts whose states it can keep before it must catch up; None for no limit."""

    @property
    @abstractmethod
    def version(self) -> Hashable:
        """A number that changes when memory used by captured rounds has moved."""

    @abstractmethod
    def seat(self, texts: Texts, *, batch_size: int) -> None:
        """Seat requests with these texts in their slots (of ``batch_size``)."""

    @abstractmethod
    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Seat requests whose prompts the next rounds read piece by piece (``read``)."""

    @abstractmethod
    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        """Read the tokens that rounds without drafts have added."""

    @abstractmethod
    def fits(self, capacity: int) -> bool:
        """Whether this drafter can follow a text of this many tokens."""

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        """Whether memory suffices for the slots' texts to reach these lengths."""
        del reaches, batch_size
        return True

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        """Prepare for the slots' texts to reach these lengths in the next rounds."""
        del reaches, batch_size

    @abstractmethod
    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """Move the requests of ``slots`` (of ``old_size``) to the first slots of ``new_size``."""

    @abstractmethod
    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Free what the departed requests of these slots held."""

    @abstractmethod
    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        """Fill columns 1.. of ``nodes`` [B, N] with guesses; column 0 holds the roots. Must not synchronise with the
        host."""

    def read(self, frame: Frame, pieces: PromptPieces, features: Tensor | None) -> None:
        """Part of a captured round: read pieces of prompts, whose tapped states are ``features`` [R, 32, F]."""
        del frame, pieces, features

    def num_nodes(self, depth: int) -> int:
        """Number of nodes that ``propose`` fills, the root included."""
        return depth + 1

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        """The tree shapes that ``propose`` fills, fixed or written by it. None for chains."""
        del batch_size, depth
        return None

    def take(self, frame: Frame, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        """Take the tapped states [B, N, F] of a round's nodes, after the round. ``before`` [B] is the position of the
        root. ``path`` [B, 2 + D] holds that position, the number of accepted nodes and their indices; None for
        chains.
        """
        del frame, before, features, path


def followed(features: Tensor, path: Tensor | None) -> Tensor:
    """[B, 1 + D, F] states of the root and the accepted nodes in order, from those of all nodes [B, N, F]. Entries
    past them are arbitrary. ``path`` is as in ``DeviceDrafter.take``."""
    if path is None:
        return features
    steps = torch.arange(path.shape[1] - 2, device=path.device)
    accepted = torch.where(steps < path[:, 1:2], path[:, 2:], 0)
    index = torch.cat([torch.zeros_like(accepted[:, :1]), accepted], 1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
