"""The blocks of a Falcon tree, on the host and in a captured round.

Keeps the blocks that were opened: their states, their carried LSTM states, and the columns they see. The caller provides the
attention of columns to the text and to one another (``BlockAttention``).
"""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from outrider.models.heads.falcon import FalconHead
from outrider.models.heads.levels import HeadLevels


class BlockAttention(Protocol):
    """The decoder layer over the columns of blocks."""

    def __call__(self, columns: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        """[B, N, H] states of columns [B, N, H] at positions [B, N], after those of all earlier calls. ``seen`` [B, N,
        columns of all calls] masks columns beside the text; None for columns of the text."""
        ...


@final
class FalconLevels(HeadLevels):
    """The nodes that a Falcon head expanded in one round."""

    def __init__(self, head: FalconHead, last: Tensor, num_columns: Tensor, roots: Tensor, look: BlockAttention) -> None:
        """``last`` [B, k, 4H] is the carried state of each row's last k of ``num_columns`` [B, 1] columns; ``roots`` is
        [B, 1]."""
        super().__init__(head)
        self._falcon, self._size, self._look, self._lengths = head, head.block_len, look, num_columns
        self._seen = torch.ones(len(last), 1, 0, dtype=torch.bool, device=last.device)
        """[B, blocks, own columns] mask: which columns of blocks below the root's each block sees."""
        self._carried, self._block = last[:, -1:], torch.zeros_like(roots)
        """[B, blocks, 4H] carried states, and [B, nodes] the block whose laws a node uses."""
        self._path = roots[..., None].expand(-1, -1, self._size)
        """[B, nodes, k] the last tokens on the path to each node."""
        positions = (num_columns + torch.arange(-self._size, 0, device=last.device)).clamp(min=0)
        self._outputs = look(head.entering(last), positions, None)[:, None]
        """[B, blocks, k, H]"""

    def _root_states(self) -> Tensor:
        return self._outputs[:, 0, :1]

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = _at(self._path, parents)
        self._path = torch.cat([self._path, torch.cat([above[:, :, 1:], tokens[..., None]], 2)], 1)
        blocks = self._block.gather(1, parents)
        if self.depth % self._size == 0:
            blocks = self._open(self._path[:, -tokens.shape[1] :], blocks)
        self._block = torch.cat([self._block, blocks], 1)
        return _at(self._outputs[:, :, self.depth % self._size], blocks)

    def _open(self, tokens: Tensor, above: Tensor) -> Tensor:
        """[B, M] numbers of new blocks with ``tokens`` [B, M, k], below the blocks ``above`` [B, M]."""
        head, (rows, count), first = self._falcon, above.shape, self._outputs.shape[1]
        features, begin = _at(self._outputs, above), _at(self._carried, above)
        carried = head.read(tokens.flatten(0, 1), features.flatten(0, 1), begin.flatten(0, 1)).unflatten(0, (rows, count))
        own = torch.eye(count, dtype=torch.bool, device=above.device).repeat_interleave(self._size, 1).expand(rows, -1, -1)
        seen = torch.cat([_at(self._seen, above), own], 2)
        none = self._seen.new_zeros(*self._seen.shape[:2], count * self._size)
        self._seen = torch.cat([torch.cat([self._seen, none], 2), seen], 1)
        positions = self._lengths + self.depth - self._size + torch.arange(self._size, device=above.device)
        entering = head.entering(carried).flatten(1, 2)
        outputs = self._look(entering, positions.repeat(1, count), seen.repeat_interleave(self._size, 1))
        self._outputs = torch.cat([self._outputs, outputs.unflatten(1, (count, self._size))], 1)
        self._carried = torch.cat([self._carried, carried[:, :, -1]], 1)
        return torch.arange(first, first + count, device=above.device).expand(rows, -1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """[B, M, ...] the entries of [B, N, ...] at ``index`` [B, M]."""
    shape = values.shape[2:]
    return values.gather(1, index.view(*index.shape, *[1] * len(shape)).expand(*index.shape, *shape))
