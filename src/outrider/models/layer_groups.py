"""Layers of a draft that run at the same time, and layers that run in order, each on the rank that holds it.

A small model on several devices mostly waits for messages: a divided layer needs two. Whole layers on different ranks can run
at the same time instead, if all layers of a group read the group's input. The result is *fuzzy*: close to the model's, with two
messages a group. ``Group`` does this. ``Relayed`` runs one layer exactly. (Wu et al. 2025, EasySpec, arXiv 2502.02493.)

    y = x + sum_j attention_j(x),        z = y + sum_j mlp_j(y),        j over the layers of a group, on all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.models.layers import AnyLayer, Pass
from outrider.models.rank_sums import Joint


@final
class Group(AnyLayer):
    """Layers that all read the group's input. This rank has the layers ``mine``."""

    def __init__(self, mine: Sequence[AnyLayer], joint: Joint) -> None:
        self._mine, self._joint = mine, joint

    def part(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        if attends:
            x = x + self._added(x, step, feeds=False)
        return x + self._added(x, step, attends=False) if feeds else x

    def _added(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        """The sum of what attention, or the MLP, of all layers of the group adds to the residual stream."""
        added = torch.zeros_like(x)
        for layer in self._mine:
            added += layer.part(x, step, attends=attends, feeds=feeds) - x
        return self._joint.sum(added)


@final
class Relayed(AnyLayer):
    """A layer that rank ``holder`` has. Every rank gets its output; ``mine`` is None on the others."""

    def __init__(self, holder: int, mine: AnyLayer | None, joint: Joint) -> None:
        self._holder, self._mine, self._joint = holder, mine, joint

    def part(self, x: Tensor, step: Pass, *, attends: bool = True, feeds: bool = True) -> Tensor:
        out = x if self._mine is None else self._mine.part(x, step, attends=attends, feeds=feeds)
        return self._joint.of(self._holder, out)
