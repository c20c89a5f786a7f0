"""Combines the shares of a divided model: sums over ranks, and the embedding table.

A share holds some heads, some columns of the MLP and some rows of the vocabulary. Its output of attention or of the MLP is one
term of a sum over ranks. ``Joint`` computes that sum. A decoder without one is whole.

    x + sum_r out_r(attention_r(x)),        x + sum_r down_r(gated_r(x)),        embedding = sum_r rows_r
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from outrider.models.layers import Mlp
from outrider.models.linear import Linear


class Joint(ABC):
    """One share's place among all of them."""

    rank: int
    spans: Sequence[tuple[int, int]]
    """First and last + 1 vocabulary row of each rank. Ranks differ by at most one row."""
    is_wired: bool = True
    """Whether sums over ranks can be part of a captured graph."""

    @abstractmethod
    def gather(self, values: Tensor) -> list[Tensor]:
        """The ``values`` of all ranks, by rank. They have the same size."""

    @abstractmethod
    def of(self, rank: int, values: Tensor) -> Tensor:
        """The ``values`` of one rank, on every rank. All ranks pass a tensor of the same size."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values`` in rank order, with the same bits on every rank."""
        parts = self.gather(values)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(values.dtype)

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        """[..., V] from every rank's own columns [..., V / ranks]."""
        padded = torch.nn.functional.pad(logits, (0, self.widest - logits.shape[-1]))
        parts = zip(self.gather(padded), self.spans, strict=True)
        return torch.cat([part[..., : end - begin] for part, (begin, end) in parts], -1)

    def best(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The token with the largest value over all ranks, the first among equals, like ``argmax`` over the whole
        vocabulary."""
        all_values, all_tokens = torch.stack(self.gather(values)), torch.stack(self.gather(tokens))
        return all_tokens.gather(0, all_values.argmax(0, keepdim=True))[0]

    def embed(self, look_up: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """[..., H] rows of the whole embedding table. ``look_up`` finds those that this rank holds, counted from its first."""
        places = tokens - self.first_token
        is_mine = (places >= 0) & (places < self.num_tokens)
        found = look_up(places.clamp(0, self.num_tokens - 1))
        return self.sum(torch.where(is_mine[..., None], found, 0.0))

    def tell(self, verb: str, *arguments: Any) -> None:
        """Send a command to the following ranks. By default there are none."""
        del verb, arguments

    @property
    def first_token(self) -> int:
        """First row of the vocabulary that this share holds."""
        return self.spans[self.rank][0]

    @property
    def num_tokens(self) -> int:
        """Rows of the vocabulary that this share holds."""
        begin, end = self.spans[self.rank]
        return end - begin

    @property
    def widest(self) -> int:
        """Most rows of the vocabulary that a share holds."""
        return max(end - begin for begin, end in self.spans)


@final
class Alone(Joint):
    """One rank that holds everything."""

    rank, spans = 0, ((0, 0),)

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]

    def of(self, rank: int, values: Tensor) -> Tensor:
        del rank
        return values

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        return logits

    def embed(self, look_up: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        return look_up(tokens)


ALONE = Alone()


@final
class SummedLinear(Linear):
    """A product whose inputs are divided among ranks. Every rank gets the whole sum."""

    def __init__(self, share: Linear, joint: Joint) -> None:
        self._share, self._joint = share, joint

    def __call__(self, x: Tensor) -> Tensor:
        return self._joint.sum(self._share(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


@final
class SummedMlp(Mlp):
    """Experts whose columns are divided among ranks. All ranks choose the same experts, and their outputs are summed."""

    def __init__(self, share: Mlp, joint: Joint) -> None:
        self._share, self._joint = share, joint

    def __call__(self, x: Tensor) -> Tensor:
        return self._joint.sum(self._share(x))
