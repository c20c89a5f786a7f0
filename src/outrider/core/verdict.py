"""What an acceptance rule decides: the accepted path, the next token, and why it stopped there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Verdict:
    """One walk per row. A row commits ``num_accepted + 1`` tokens: the accepted path, then ``next_token``."""

    path: Tensor
    """[B, D] accepted nodes from the root's child downwards; entries past ``num_accepted`` mean nothing."""
    num_accepted: Tensor
    """[B] length of the accepted path."""
    next_token: Tensor
    """[B] the token after the path: *recovered* where guesses were rejected there, *bonus* where there were none."""
    rejected: Tensor
    """[B] true where the path ended because every guess at that node was rejected; false at a leaf."""

    @property
    def rows(self) -> list[RowVerdict]:
        """The verdict on each row. Waits for the device."""
        found = (tensor.tolist() for tensor in (self.path, self.num_accepted, self.next_token, self.rejected))
        return [RowVerdict(tuple(path[:length]), token, rejected) for path, length, token, rejected in zip(*found, strict=True)]


class RowVerdict(NamedTuple):
    """The verdict on one row, as the scalar form of a rule returns it."""

    path: tuple[int, ...]
    next_token: int
    rejected: bool
