"""EAGLE inside a captured round: the head reads the newest columns again, then grows a tree of a fixed shape level by level.

The target's states of a round are written where the text has them, so that a column (state c, token c + 1) can be read at any
time. A round adds at most depth + 1 tokens; reading the last so many columns again covers every case with one shape of pass, as
``models/gpu/branches.py`` does for draft models. Keys and values of columns stay in a memory of their own; those of guesses
live for the round. The same trees as ``drafters/eagle.py`` with a static shape. Plain operations, fast because nobody launches
them one by one.

    children(u) = first k of   log q(. | u) + g_position                     coupled, as the target will choose
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame
from outrider.core.tree import ancestors_of
from outrider.models.config import ModelConfig
from outrider.models.gpu.branches import FedTree, Level
from outrider.models.gpu.choose import block_bests, pick_children
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.layer import Attending, Rotations
from outrider.models.layers import rotate

_CHUNK = 512
"""Most columns read in one pass."""
_STEP = 256


@dataclass(frozen=True, eq=False)
class Memory:
    """What the slots of a frame hold, at addresses that stay."""

    keys: Tensor
    """[B, kv heads, S, D] of columns."""
    values: Tensor
    features: Tensor
    """[B, S, F] the target's states."""

    @property
    def capacity(self) -> int:
        return self.features.shape[1]


@final
class SlotAttending(Attending):
    """Nodes over the memory of their slots. Columns are written to it; guesses stand beside it, with their own sight."""

    def __init__(self, memory: Memory, rotation: tuple[Tensor, Tensor], config: ModelConfig, *, seen: Tensor) -> None:
        """``seen`` [B, N] is how many columns each node sees."""
        self._memory, self._rotation, self._config = memory, rotation, config
        places = torch.arange(memory.capacity, device=seen.device)
        self.mask = places < seen[..., None]
        self.columns: Tensor | None = None
        """[B, N] where the nodes are written, if they are columns."""
        self.beside: tuple[list[Tensor], list[Tensor], Tensor] | None = None
        """Keys and values of guesses so far, which the call appends to, and [N, M] which of them the nodes see."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys = rotate(queries, self._rotation), rotate(keys, self._rotation)
        memory, mask = self._memory, self.mask
        all_keys, all_values = memory.keys, memory.values
        if self.columns is not None:
            index = self.columns[:, None, :, None].expand_as(keys)
            all_keys.scatter_(2, index, keys)
            all_values.scatter_(2, index, values)
        if self.beside is not None:
            past_keys, past_values, sees = self.beside
            past_keys.append(keys)
            past_values.append(values)
            all_keys, all_values = torch.cat([all_keys, *past_keys], 2), torch.cat([all_values, *past_values], 2)
            mask = torch.cat([mask, sees.expand(len(mask), -1, -1)], 2)
        batch_size, num_heads, num_nodes, head_dim = queries.shape
        groups = num_heads // self._config.num_kv_heads
        folded = queries.reshape(batch_size, self._config.num_kv_heads, groups * num_nodes, head_dim)
        mask = mask.repeat(1, groups, 1)[:, None]
        seen = F.scaled_dot_product_attention(folded, all_keys, all_values, attn_mask=mask, scale=self._config.query_scale)
        return seen.reshape(batch_size, num_heads, num_nodes, head_dim)


@final
class DeviceEagle(DeviceDrafter):
    """Trees from an EAGLE head. ``ranks[n]`` says which of its parent's best tokens node n is."""

    def __init__(self, head: EagleHead, target: FastDecoder, *, parents: Sequence[int], ranks: Sequence[int]) -> None:
        assert head.config.layer is not None
        self.head, self._target, self._layer = head, target, head.config.layer
        self.taps, self.parents = head.config.taps, tuple(parents)
        self._tree = FedTree.of(parents, ranks, target.device)
        self.shortest = self._tree.max_depth + 2
        self._back = torch.arange(self._tree.max_depth + 1, device=target.device)
        shape = self._tree.shape.parents
        self._sees = ancestors_of(shape[None])[0, :, 1:]  # the root is a column
        self._rotations = Rotations(self._layer)
        self._memories: dict[int, Memory] = {}
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def fits(self, capacity: int) -> bool:
        return capacity <= self._layer.max_len

    def leave(self, batch_size: int) -> None:
        """Slots hold nothing that another request could not write over."""
        del batch_size

    def seat(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, capacity: int) -> None:
        memory = self._room(batch_size, capacity)
        with torch.inference_mode():
            cache = self._target.new_cache(len(rows))
            found = self._target.prefill([row[:-1] for row in rows], cache, taps=self.taps)
            for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
                memory.features[slot, : len(row) - 1] = torch.cat([found[tap][index] for tap in self.taps], -1)
                self._read(memory, slot, row, begin=0)

    def catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], *, batch_size: int, known: Sequence[int]) -> None:
        with torch.inference_mode():
            for slot, row, length in zip(slots, rows, known, strict=True):
                self._read(self._memories[batch_size], slot, row, begin=max(0, length - 1 - len(self._back)))

    def propose(self, frame: Frame, nodes: Tensor) -> None:
        memory = self._memories[frame.batch_size]
        before = (frame.lengths - 1 - len(self._back)).clamp(min=0)  # slots nobody holds are shorter
        columns = before[:, None] + self._back
        features = memory.features.gather(1, columns[..., None].expand(-1, -1, memory.features.shape[2]))
        states = self._columns(memory, columns, frame.tokens.gather(1, columns + 1), features)[:, -1:]
        found, past = states, (list[Tensor](), list[Tensor]())
        for level in self._tree.levels:
            if level.first:
                states = self._guesses(memory, frame, nodes, level, above=found, past=past)
                found = torch.cat([found, states], 1)
            logits = self.head.over_target(self.head.readout(int(level.first), states)).float().contiguous()
            num_best = level.children.shape[1]
            tops = block_bests(logits, frame, depths=level.depths, vocab_size=self._target.vocab_size, num_best=num_best)
            pick_children(tops, nodes, level.children)

    def take(self, before: Tensor, features: Tensor, path: Tensor | None) -> None:
        memory = self._memories[len(before)]
        if path is not None:
            steps = torch.arange(path.shape[1] - 2, device=path.device)
            followed = torch.where(steps < path[:, 1:2], path[:, 2:], 0)
            index = torch.cat([torch.zeros_like(followed[:, :1]), followed], 1)
            features = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
        places = before[:, None] + torch.arange(features.shape[1], device=before.device)
        places = places.clamp(max=memory.capacity - 1)[..., None].expand_as(features)
        memory.features.scatter_(1, places, features.to(memory.features.dtype))

    def _room(self, batch_size: int, capacity: int) -> Memory:
        memory = self._memories.get(batch_size)
        if memory is None or memory.capacity < capacity + _STEP:
            size, config = -(-(capacity + _STEP) // _STEP) * _STEP, self._layer
            like = next(self.head.parameters())
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                keys = like.new_zeros(batch_size, config.num_kv_heads, size, config.head_dim)
                features = like.new_zeros(batch_size, size, len(self.taps) * config.hidden_size)
                memory = self._memories[batch_size] = Memory(keys, torch.zeros_like(keys), features)
            self._version += 1
        return memory

    def _read(self, memory: Memory, slot: int, row: Sequence[int], *, begin: int) -> None:
        """Columns ``begin``.. of a slot whose tokens are ``row``."""
        mine = Memory(memory.keys[slot : slot + 1], memory.values[slot : slot + 1], memory.features[slot : slot + 1])
        for first in range(begin, len(row) - 1, _CHUNK):
            last = min(first + _CHUNK, len(row) - 1)
            columns = torch.arange(first, last, device=memory.keys.device)[None]
            tokens = torch.tensor([list(row[first + 1 : last + 1])], device=columns.device)
            self._columns(mine, columns, tokens, mine.features[:, first:last])

    def _columns(self, memory: Memory, columns: Tensor, tokens: Tensor, features: Tensor) -> Tensor:
        """[B, N, H] states of columns [B, N], which each see those up to themselves."""
        fused = self.head.fuse(features)
        attending = SlotAttending(memory, self._rotations.at(columns, fused.dtype), self._layer, seen=columns + 1)
        attending.columns = columns
        return self.head.step(tokens, fused, attending)

    def _guesses(
        self,
        memory: Memory,
        frame: Frame,
        nodes: Tensor,
        level: Level,
        *,
        above: Tensor,
        past: tuple[list[Tensor], list[Tensor]],
    ) -> Tensor:
        """[B, M, H] states of a level's fed nodes; ``above`` are those of all fed before them."""
        end = level.first + len(level.fed)
        parents = self._tree.shape.parents[level.first : end]
        positions = (frame.lengths - 2)[:, None] + self._tree.shape.depths[level.first : end]
        seen = (frame.lengths - 1)[:, None].expand(-1, len(level.fed))
        rotation = self._rotations.at(positions, above.dtype)
        attending = SlotAttending(memory, rotation, self._layer, seen=seen)
        attending.beside = (*past, self._sees[level.first : end, : end - 1])
        return self.head.step(nodes.index_select(1, level.fed), above.index_select(1, parents), attending)
