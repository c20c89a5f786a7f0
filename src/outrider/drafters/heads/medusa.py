"""Medusa: heads on the target's last state guess the next few tokens at once, and a tree combines their best candidates.

Head k sees the state before the root and predicts the k-th guess, whatever the guesses before it were. So all nodes of a level
share one law, and a whole tree costs one small matrix product per level. (Cai et al. 2024, arXiv 2401.10774.)

    q(. | node at depth d) = softmax(W_d res_d(norm(h)))            h: last state of the token before the root

The paper's "typical" acceptance changes the text. Here the coupled rule decides, so the method is lossless.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.newest import NewestDrafter
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.levels import SharedLevels
from outrider.models.heads.medusa import KIND, MedusaHead


@final
class Medusa(NewestDrafter):
    """Trees from independent heads."""

    def __init__(self, head: MedusaHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _levels(self, features: Tensor, roots: Tensor) -> SharedLevels:
        del roots
        return SharedLevels(self.head, lambda depth: self.head.state(depth, features))


def build(parts: Parts) -> Drafter:
    return Medusa(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="heads on the target's last state guess the next tokens at once (trained)",
    paper="Cai et al. 2024, Medusa (arXiv 2401.10774)",
    drafter=Medusa,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
