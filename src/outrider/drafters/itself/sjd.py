"""Speculative Jacobi decoding: the target's own laws of the last pass are the draft of the next one.

One pass over a window of W guesses yields the target's law after each of them. Guesses are tested against the laws they were
drawn from. Those after the first rejected one are drawn again, each from the law of this pass at its position, which becomes
its q. Positions that no pass has scored yet are filled. In plain Jacobi iteration a guess must equal the target's choice; here
it only has to pass the test of rejection sampling (Teng et al. 2025, arXiv 2410.01699).

    pass:   P_i = p(. | prefix, w_1 .. w_{i-1})                 accept w_i  iff  u_i q_i(w_i) < P_i(w_i)
    after:  w_j ~ P_j,  q_j <- P_j      for every place j after the first rejection

Lossless: w_j is drawn from q_j with its own random numbers. So given everything before it, w_j is a draw from q_j, whatever was
accepted, and rejection sampling is exact for any q. The released code tests fills as point masses, which are accepted with
probability P(w). Here a fill is tested against the law it was drawn from, and accepted with probability 1 - TV.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.rng import Noise
from outrider.drafters.itself.jacobi_window import JacobiWindow, WindowOptions, at_places


@final
class SpeculativeJacobi(JacobiWindow):
    """Draws the guesses of every pass with fresh noise."""

    offers: ClassVar = (Draws.IID,)
    draws = Draws.IID

    def numbers(self, noise: Noise, row: int, places: range, *, num_nodes: int) -> tuple[Noise, Tensor]:
        """The round's random numbers. Fills use the first half of the lanes, redrawn guesses the second half."""
        lanes = torch.tensor(list(places), device=noise.seeds.device) + num_nodes
        return at_places(noise, row, noise.positions[row].expand(len(places))), lanes[:, None]


def build(parts: Parts) -> Drafter:
    return SpeculativeJacobi(parts.options, dtype=parts.target.dtype)


ROW = MethodRow(
    summary="the target's own laws of the last pass, drawn again and tested",
    paper="Teng et al. 2025 (arXiv 2410.01699)",
    drafter=SpeculativeJacobi,
    build=build,
    options=WindowOptions,
    defaults={"num_draft_tokens": 8},
    acceptance="rejection",
)
