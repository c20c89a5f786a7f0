"""Heads that are evaluated level by level: the state that a level passes to the next, on the host and in captured rounds.

    states(level d) = f_d(states above, tokens of level d),      logits(level d) = readout_d(states)

Only tensors are used, without any work on the host. So the same code grows trees for ``drafters/heads`` and inside captured
rounds (``device/drafters/heads/slots.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from torch import Tensor

from outrider.models.heads.head import Head


class LevelStates(ABC):
    """States of the newest level of a tree, with the logits that a head reads from them."""

    head: Head
    depth: int
    """Depth of the newest level."""

    def _read_off(self, states: Tensor) -> Tensor:
        """[B, M, Vd] logits of the newest nodes' states."""
        return self.head.readout(self.depth, states)

    @abstractmethod
    def _root_states(self) -> Tensor:
        """[B, 1, H] states at the root."""

    @abstractmethod
    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, M, H] states at the newest nodes, or [B, 1, H] if they are all the same."""


class HeadLevels(LevelStates, ABC):
    """The nodes that heads expanded in one round, without attention to the text."""

    def __init__(self, head: Head) -> None:
        self.head, self.depth = head, 0
        self._num_asked = 1

    @final
    def at_root(self) -> Tensor:
        """[B, 1, Vd] logits after the root."""
        return self._read_off(self._root_states())

    @final
    def below(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B, M, Vd] logits after M new nodes, or [B, 1, Vd] if they are all the same. ``parents`` [B, M] are numbers of
        expanded nodes; the root is 0."""
        self.depth += 1
        states = self._states(tokens, parents)
        self._num_asked += tokens.shape[1]
        return self._read_off(states)


@final
class SharedLevels(HeadLevels):
    """Heads that do not see the guesses: every level of the tree has one state."""

    def __init__(self, head: Head, state_of: Callable[[int], Tensor]) -> None:
        """``state_of(depth)`` returns the state [B, 1, H] of a level. It is called once."""
        super().__init__(head)
        self._state_of = state_of

    def _root_states(self) -> Tensor:
        return self._state_of(0)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        del tokens, parents
        return self._state_of(self.depth)
