"""Medusa: heads on the target's last state guess the next few tokens at once, and a tree combines their best candidates.

Head k sees the state before the root and answers for the k-th guess, whatever the guesses before it were: all nodes of a
level share one law, and a whole tree costs one small matrix product per level. (Cai et al. 2024, arXiv 2401.10774.)

    q(. | node at depth d) = softmax(W_d res_d(norm(h)))            h: last state of the token before the root

The paper accepts "typical" guesses and changes what is said; here the coupled rule accepts, and nothing changes: lossless.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context
from outrider.drafters.head_growth import HeadGrowth
from outrider.drafters.head_tree import HeadDrafter, HeadOptions, HeadState
from outrider.models.heads.medusa import MedusaHead


@final
class Medusa(HeadDrafter):
    """Trees from independent heads."""

    def __init__(self, head: MedusaHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _growth(self, state: HeadState, context: Context) -> MedusaGrowth:
        last = [p[-1:] if len(p) else p.new_zeros(1, p.shape[1]) for p in state.pending]
        return MedusaGrowth(self.head, context, torch.stack(last))


@final
class MedusaGrowth(HeadGrowth):
    """Every level has one state."""

    def __init__(self, head: MedusaHead, context: Context, features: Tensor) -> None:
        super().__init__(head, context)
        self._medusa, self._features = head, features

    def _root_states(self) -> Tensor:
        return self._medusa.state(0, self._features)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        del tokens, parents
        return self._medusa.state(self.depth, self._features)
