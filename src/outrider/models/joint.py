"""Where the shares of a divided model meet: sums over ranks, and the table of embeddings.

A share holds some heads, some columns of the MLP and some rows of the vocabulary. What it computes of a half layer is one term
of a sum over ranks. ``Joint`` is that sum; a decoder that was given none is whole.

    x + sum_r out_r(attention_r(x)),        x + sum_r down_r(gated_r(x)),        embedding = sum_r rows_r
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from outrider.models.layers import Mlp
from outrider.models.linear import Linear


class Joint(ABC):
    """The place of one share among all of them."""

    first_token: int
    """First row of the vocabulary that this share holds."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum of every rank's ``values``, in rank order: the same bits on every rank, whatever the size."""

    @abstractmethod
    def of(self, rank: int, values: Tensor) -> Tensor:
        """The ``values`` of one rank, on every rank. All give a tensor of the same size."""

    @final
    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """[..., H] rows of the whole vocabulary's table, of which this rank holds ``table``."""
        places = tokens - self.first_token
        is_mine = (places >= 0) & (places < len(table))
        found = table[places.clamp(0, len(table) - 1)]
        return self.sum(torch.where(is_mine[..., None], found, 0.0))


@final
class Alone(Joint):
    """One rank that holds everything."""

    first_token = 0

    def sum(self, values: Tensor) -> Tensor:
        return values

    def of(self, rank: int, values: Tensor) -> Tensor:
        del rank
        return values


@final
class SummedLinear(Linear):
    """A product whose inputs are divided among ranks: every rank gets the whole sum."""

    def __init__(self, share: Linear, joint: Joint) -> None:
        self._share, self._joint = share, joint

    def __call__(self, x: Tensor) -> Tensor:
        return self._joint.sum(self._share(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


@final
class SummedMlp(Mlp):
    """Experts of which every rank holds some columns: each chooses alike, and what they return is summed."""

    def __init__(self, share: Mlp, joint: Joint) -> None:
        self._share, self._joint = share, joint

    def __call__(self, x: Tensor) -> Tensor:
        return self._joint.sum(self._share(x))
