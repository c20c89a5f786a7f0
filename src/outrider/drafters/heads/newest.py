"""Heads without a memory: they read only the target's newest states, and the token after them.

known at a round:  states of tokens n - 1 - K .. n - 2,  the root (token n - 1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Plan
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, newest
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads import Head
from outrider.models.heads.levels import HeadLevels
from outrider.models.native.heads import native_heads

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


class NewestDrafter(HeadDrafter, ABC):
    """Trees from the newest states."""

    def __init__(self, head: Head, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self._head = head
        self._native = native_heads(head) if self._bits == 16 else None

    @abstractmethod
    def _levels(self, features: Tensor, roots: Tensor) -> HeadLevels:
        """The heads at the roots [B, 1], from the newest states [B, K, F]."""

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        del max_depth
        roots = torch.tensor(context.roots, device=context.device)[:, None]
        return LevelsGrowth(context, self._levels(newest(state, self.num_kept), roots))

    def _in_one_call(self, state: HeadState, context: Context, plan: Plan) -> TokenTree | None:
        growing = None if self._native is None else self._growing(context, plan)
        if self._native is None or growing is None:
            return None
        return self._native.tree(self._read_states(state, context), torch.tensor(context.roots), growing)

    def _read_states(self, state: HeadState, context: Context) -> Tensor:
        """[B, K, H] what the heads see of the text before the roots."""
        del context
        return newest(state, self.num_kept)

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.memory import NoMemory  # needs triton

        del max_depth
        return NoMemory(self._head, self.num_kept, self._levels)
