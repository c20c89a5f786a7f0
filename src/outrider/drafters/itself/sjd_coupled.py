"""Coupled speculative Jacobi decoding: a position keeps its random numbers, so its guess changes only if the law there changes.

``sjd`` draws every pending guess again with new random numbers. So the window changes at random, and the laws after a changed
guess change with it. Here the draw at an output position is the Gumbel-max choice with that position's own noise. Where the law
hardly changes the guess stays, so the window converges (So et al. 2025, "MC-SJD", arXiv 2510.24211: its Gumbel coupling).

    w_j = argmax(log P_j + g_j),   q_j <- P_j,   g_j fixed for the position j until it is written

Lossless under rules that judge from the top down: laws are causal, so nothing before position j depends on g_j. Given
everything that decides whether position j is reached, its guess is a draw from q_j. Rules that look ahead (block, traversal)
are refused: they stop because of later guesses, whose random numbers are used again. The numbers are not the target's own.
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
class CoupledJacobi(JacobiWindow):
    """Draws the guess of a position with the same noise in every pass."""

    offers: ClassVar = (Draws.BEAM,)
    """One sampled guess per node, for rules that test from the top down."""
    draws = Draws.BEAM

    def numbers(self, noise: Noise, row: int, places: range, *, num_nodes: int) -> tuple[Noise, Tensor]:
        """The random numbers of the output position."""
        del num_nodes
        ahead = torch.tensor(list(places), device=noise.seeds.device)
        return at_places(noise, row, noise.positions[row] + ahead), torch.zeros_like(ahead)[:, None]


def build(parts: Parts) -> Drafter:
    return CoupledJacobi(parts.options, dtype=parts.target.dtype)


ROW = MethodRow(
    summary="as sjd, with random numbers that stay with each place",
    paper="So et al. 2025 (arXiv 2510.24211)",
    drafter=CoupledJacobi,
    build=build,
    options=WindowOptions,
    defaults={"num_draft_tokens": 8},
    acceptance="recursive",
)
