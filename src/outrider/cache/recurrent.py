"""The cache of a model with recurrent layers: a state per layer, and the steps of the newest tokens.

A state has no slots, so a token cannot be taken back out of it. The cache therefore keeps the state from *before* the newest
tokens, and a log of what these tokens do to it (``cache/replay.py``). The nodes of a tree are written after the log. A
commit moves the steps of the accepted path to the end of the log and drops the others: no state is copied for a node. When
the log is long, its older part is replayed into the state. A pass reads the state and the log together.

    columns   [ inputs of the window | log: newest tokens | nodes of the tree ]      one row of the batch
                                     ^ begin              ^ end

Rows end at the same column. A shorter row has steps of zeros on its left, which change nothing. Attention layers of a hybrid
keep their keys and values in a ``ContiguousCache``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.replay import ScanShape, Steps, replayed
from outrider.core.interfaces import Cache

_KEPT = 32
"""Number of newest tokens whose steps stay in the log. As many can be taken back."""
_LONGEST = 64
"""When the log holds this many tokens, the older ones are replayed into the state."""


@dataclass(eq=False)
class Recurrence:
    """States and log of B rows, in memory of their own."""

    states: Tensor
    """[L, B, heads, P, K] before the first column of the log."""
    log: Tensor
    """[L, B, columns, numbers]: convolution inputs, decays, keys and values of each token, side by side."""
    begin: int
    end: int
    logged: list[int]
    """Tokens of each row in the log."""


class StateColumns(NamedTuple):
    """The memory of one layer."""

    state: Tensor
    """[B, heads, P, K] before column ``begin``."""
    log: Tensor
    """[B, columns, numbers]"""
    begin: int
    """First column of the log; the inputs of the convolution begin a window before it."""
    end: int
    """Column of the root."""


@final
class RecurrentCache(Cache):
    """B rows of a model whose layers are recurrent, or partly so."""

    def __init__(self, shape: ScanShape, attention: ContiguousCache, recurrence: Recurrence) -> None:
        self.shape, self.attention = shape, attention
        self.lengths = list(attention.lengths)
        self._held = recurrence
        self._first_node = self._num_nodes = 0

    @staticmethod
    def empty(shape: ScanShape, attention: ContiguousCache, *, dtype: torch.dtype) -> RecurrentCache:
        """A cache without tokens. ``attention`` is the cache of the model's attention layers, of which there may be none."""
        batch_size, device = attention.batch_size, attention.block.device
        size = (shape.num_layers, batch_size, shape.num_heads, shape.head_dim, shape.state_size)
        states = torch.zeros(size, dtype=dtype, device=device)
        begin = shape.conv_len - 1
        log = torch.zeros(shape.num_layers, batch_size, begin, sum(shape.parts), dtype=dtype, device=device)
        return RecurrentCache(shape, attention, Recurrence(states, log, begin, begin, [0] * batch_size))

    @property
    def num_logged(self) -> int:
        """Columns of the log."""
        return self._held.end - self._held.begin

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's states and convolution windows."""
        return self._bytes(self.shape.num_state + self.shape.num_window)

    @property
    def node_bytes(self) -> int:
        """Bytes that one node of a tree takes in the recurrent layers."""
        return self._bytes(sum(self.shape.parts))

    def snapshot_bytes(self, num_nodes: int) -> int:
        """Bytes that a copy of states and windows after every node would take instead."""
        return num_nodes * self.state_bytes

    def _bytes(self, numbers: int) -> int:
        return self.shape.num_layers * numbers * self._held.log.element_size()

    @torch.inference_mode()
    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.attention.reserve(num_nodes, start=start)
        held = self._held
        if held.end + num_nodes > held.log.shape[2]:
            self._hold(held.log[:, :, self._window :], room=num_nodes + _LONGEST + _KEPT)
        self._first_node, self._num_nodes = start, num_nodes

    def state(self, layer: int) -> Tensor:
        """[B, heads, P, K] before the log."""
        return self._held.states[layer]

    def columns(self, layer: int) -> StateColumns:
        """A layer's memory as native scans and kernels take it."""
        return StateColumns(self._held.states[layer], self._held.log[layer], self._held.begin, self._held.end)

    def write_inputs(self, layer: int, inputs: Tensor) -> Tensor:
        """Write the convolution inputs [B, N, C] of the nodes last reserved. Returns the inputs of window, log and nodes."""
        held, size = self._held, self.shape.conv_size
        held.log[layer, :, self._node_columns, :size] = inputs
        return held.log[layer, :, self._window : held.end + self._num_nodes, :size]

    def write_steps(self, layer: int, steps: Steps) -> Steps:
        """Write the steps of the nodes last reserved. Returns the steps of log and nodes."""
        rows = torch.cat([part.flatten(2) for part in steps], -1)
        self._held.log[layer, :, self._node_columns, self.shape.conv_size :] = rows
        return self.steps(layer)

    def steps(self, layer: int) -> Steps:
        """Steps of log and nodes, in the order of columns."""
        return self._steps(self._held.log[layer, :, self._held.begin : self._held.end + self._num_nodes])

    @property
    def _window(self) -> int:
        """The first column of the convolution's window, which lies before the log."""
        return self._held.begin - self.shape.conv_len + 1

    @property
    def _node_columns(self) -> slice:
        return slice(self._held.end + self._first_node, self._held.end + self._num_nodes)

    def _steps(self, columns: Tensor) -> Steps:
        """The steps that one layer's numbers [B, T, numbers] hold."""
        _, decays, keys, values = columns.split_with_sizes(self.shape.parts, -1)
        shape = self.shape
        keys = keys.unflatten(-1, (shape.num_groups, shape.state_size))
        return Steps(decays, keys, values.unflatten(-1, (shape.num_heads, shape.head_dim)))

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        held, longest = self._held, max(len(path) for path in paths)
        self.attention.commit(paths)
        for row, path in enumerate(paths):
            self._append(row, path, longest)
        held.end += longest
        held.logged = [count + len(path) for count, path in zip(held.logged, paths, strict=True)]
        self.lengths = list(self.attention.lengths)
        self._num_nodes = 0
        if self.num_logged > _LONGEST:
            self._replay(held.end - _KEPT)

    def _append(self, row: int, path: Sequence[int], longest: int) -> None:
        """Append a row's accepted path to its log. All rows end at the same column, that of the longest path."""
        log, end, late = self._held.log, self._held.end, longest - len(path)
        if late == 0 and list(path) == list(range(longest)):
            return
        kept = log[:, row, [end + node for node in path]]
        self._shift(row, end, late)
        log[:, row, end + late : end + longest] = kept

    def _shift(self, row: int, end: int, by: int) -> None:
        """Move a row's window and log to the right, up to column ``end``. The window's tokens are already in the state, so
        their steps are set to zero."""
        if by == 0:
            return
        log, begin, window = self._held.log, self._held.begin, self._window
        log[:, row, window + by : end + by] = log[:, row, window:end].clone()
        log[:, row, begin : begin + by, self.shape.conv_size :] = 0

    def _replay(self, begin: int) -> None:
        """Bring the states forward to column ``begin``."""
        held = self._held
        for layer in range(self.shape.num_layers):
            steps = self._steps(held.log[layer, :, held.begin : begin])
            held.states[layer] = replayed(held.states[layer], steps)
        held.begin = begin
        held.logged = [min(count, self.num_logged) for count in held.logged]

    @torch.inference_mode()
    def truncate(self, lengths: Sequence[int]) -> None:
        """Truncate as far back as the log reaches. A row that would have to go further back is emptied: its length is then
        0."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), "truncate cannot lengthen a row"
        left = list(lengths)
        for row, (new, old) in enumerate(zip(lengths, self.lengths)):
            dropped = old - new
            if dropped <= self._held.logged[row]:
                self._shift(row, self._held.end - dropped, dropped)
                self._held.logged[row] -= dropped
            else:
                self._forget(row)
                left[row] = 0
        self.attention.truncate(left)
        self.lengths = left

    def _forget(self, row: int) -> None:
        self._held.states[:, row] = 0
        self._held.log[:, row] = 0
        self._held.logged[row] = 0

    @torch.inference_mode()
    def fork(self, rows: Sequence[int]) -> RecurrentCache:
        """Copies rows, with the nodes of a tree that is not committed yet."""
        held, index = self._held, torch.tensor(list(rows), dtype=torch.int64, device=self._held.log.device)
        columns = held.log[:, :, self._window : held.end + self._num_nodes].index_select(1, index)
        states, logged = held.states.index_select(1, index), [held.logged[row] for row in rows]
        forked = self._with(self.attention.fork(rows), states, columns, logged)
        forked._held.end -= self._num_nodes
        forked._num_nodes = self._num_nodes
        return forked

    @torch.inference_mode()
    def join(self, other: Cache) -> RecurrentCache:
        assert isinstance(other, RecurrentCache) and other.shape == self.shape, "only caches of one kind can be joined"
        size = max(self.num_logged, other.num_logged)
        log = torch.cat((self._aligned(size), other._aligned(size)), 1)
        states = torch.cat((self._held.states, other._held.states), 1)
        return self._with(self.attention.join(other.attention), states, log, [*self._held.logged, *other._held.logged])

    def _aligned(self, size: int) -> Tensor:
        """Window and log, moved as if the log had ``size`` columns."""
        held, missing, first = self._held, size - self.num_logged, self.shape.conv_len - 1
        num_layers, batch_size, _, numbers = held.log.shape
        grown = held.log.new_zeros(num_layers, batch_size, first + size, numbers)
        grown[:, :, missing:] = held.log[:, :, self._window : held.end]
        grown[:, :, first : first + missing, self.shape.conv_size :] = 0
        return grown

    def _with(self, attention: ContiguousCache, states: Tensor, log: Tensor, logged: list[int]) -> RecurrentCache:
        begin = self.shape.conv_len - 1
        return RecurrentCache(self.shape, attention, Recurrence(states, log, begin, log.shape[2], logged))

    def _hold(self, columns: Tensor, *, room: int) -> None:
        """Copy window and log to the front of new memory, followed by ``room`` free columns."""
        held, moved = self._held, self._window
        num_layers, batch_size, used, numbers = columns.shape
        log = columns.new_zeros(num_layers, batch_size, used + room, numbers)
        log[:, :, :used] = columns
        held.log, held.begin, held.end = log, held.begin - moved, held.end - moved
