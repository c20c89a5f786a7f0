"""Heads with attention over the text, inside captured rounds: FSPAD, multi-token prediction, P-EAGLE, Chimera.

For the round, a node follows the columns of its slot and sees its ancestors among the evaluated nodes. Heads that process a
column late, or several levels at once, read the newest columns again when a tree begins. As many are read as a round can have
added, so that one shape of pass covers every case (``Again`` in ``device/drafters/model/draft_model.py``). The oracles are the
growths of ``drafters/heads``.
"""

from __future__ import annotations

from abc import ABC
from typing import final

import torch
from torch import Tensor

from outrider.device.drafters.heads.memory import CHAIN, HeadColumns, LayerMemory, LevelAnswers, Roots, SlotAttending
from outrider.device.drafters.trees.growers import Answers, Asked
from outrider.models.attention.tree_tiles import Sights
from outrider.models.heads.chimera import NUM_TOKENS, ChimeraHead
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.levels import SharedLevels
from outrider.models.heads.mtp import CausalMtp
from outrider.models.heads.mtp_parallel import ParallelMtp
from outrider.models.heads.p_eagle import ParallelEagle


def chosen(values: Tensor, index: Tensor) -> Tensor:
    """[B, M, S] of [B, N, S] at ``index`` [B, M]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))


@final
class StepMemory(LayerMemory):
    """One layer that is applied to its own output. Its output at the newest column is the root's state."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=1)
        self._head, self.width = head, head.state_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        return self._head.step(columns.tokens(), self._head.fuse(features), self._attending(batch_size, columns)[0])

    def answers(self, roots: Roots) -> Answers:
        return _StepAnswers(self, self._head, roots)

    def behind(self, roots: Roots, asked: Asked) -> SlotAttending:
        columns = roots.columns(roots.num_columns, asked.tokens.shape[1])
        return self._attending(roots.frame.batch_size, columns, asked.sights)[0]


@final
class _StepAnswers(Answers):
    """Keeps the states of all nodes."""

    def __init__(self, memory: StepMemory, head: EagleHead, roots: Roots) -> None:
        self._memory, self._head, self._roots, self._all = memory, head, roots, roots.newest

    def root(self) -> Tensor:
        return self._head.readout(0, self._all).float()

    def below(self, asked: Asked) -> Tensor:
        states = self._head.step(asked.tokens, chosen(self._all, asked.above), self._memory.behind(self._roots, asked))
        self._all = torch.cat([self._all, states], 1)
        return self._head.readout(0, states).float()


@final
class ParallelMemory(LayerMemory):
    """A layer for each level over the target's states. Their outputs at the newest column are the states of all levels."""

    def __init__(self, head: ParallelMtp) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=len(head.layers))
        self._head, self.width = head, len(head.layers) * head.config.hidden_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        attending = self._attending(batch_size, columns)
        return torch.cat([self._head.state(depth, features, layer) for depth, layer in enumerate(attending)], -1)

    def answers(self, roots: Roots) -> Answers:
        levels = roots.newest.unflatten(-1, (len(self._head.layers), -1))[:, 0]
        return LevelAnswers(SharedLevels(self._head, lambda depth: levels[:, depth : depth + 1]))


class LateMemory(LayerMemory, ABC):
    """Layers that read the columns of a round together with the next tree, when the next tokens are known."""

    @final
    def follow(self, batch_size: int, columns: HeadColumns, features: Tensor, newest: Tensor) -> Tensor:
        del batch_size, columns, newest
        return features

    @final
    def catch_up(self, batch_size: int, columns: HeadColumns, features: Tensor, newest: Tensor) -> Tensor:
        """Stores the columns. Those whose states were kept have not been read either."""
        known, begin = torch.cat([newest, features], 1), columns.starts - self.num_kept
        whole = HeadColumns(columns.slots, begin.clamp(min=0), known.shape[1], columns.texts)
        index = (whole.at() - begin[:, None]).clamp(max=known.shape[1] - 1)
        self.read(batch_size, whole, chosen(known, index))
        return features


@final
class OpenMemory(LateMemory):
    """P-EAGLE's layers. A tree begins with one pass over the newest columns and the open places after them."""

    def __init__(self, head: ParallelEagle, max_depth: int) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=len(head.layers))
        self._head, self.num_kept = head, max_depth + 1
        self.width = len(head.config.taps) * head.config.hidden_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        self._head.step(columns.tokens(), self._head.fuse(features), self._attending(batch_size, columns))
        return features

    def answers(self, roots: Roots) -> Answers:
        head, count = self._head, self.num_kept + roots.num_levels - 1
        first = (roots.num_columns - self.num_kept).clamp(min=0)
        columns = roots.columns(first, count)
        is_column = columns.at() < roots.num_columns[:, None]
        tokens = torch.where(is_column, columns.tokens(), head.config.mask_token)
        features = torch.where(is_column[..., None], _again(roots, columns), head.mask_hidden.to(roots.newest.dtype))
        states = head.step(tokens, head.fuse(features), self._attending(roots.frame.batch_size, columns))
        steps = torch.arange(roots.num_levels, device=first.device)
        levels = chosen(states, (roots.num_columns - 1 - first)[:, None] + steps)
        return LevelAnswers(SharedLevels(head, lambda depth: levels[:, depth : depth + 1]))


def _again(roots: Roots, columns: HeadColumns) -> Tensor:
    """[B, N, F] the values kept of columns. Entries after the last column are arbitrary."""
    num_kept = roots.newest.shape[1]
    index = columns.at() - (roots.num_columns - num_kept)[:, None]
    return chosen(roots.newest, index.clamp(0, num_kept - 1))


@final
class ChainMemory(LateMemory):
    """A chain of modules. Each predicts one token further than the one before, so module k can read only columns that k more
    tokens follow."""

    def __init__(self, head: CausalMtp, max_depth: int) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=len(head.layers))
        self._head, self.num_kept, self.width = head, max_depth + len(head.layers), head.config.hidden_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        states = self._head.target_norm(features)
        for depth, attending in enumerate(self._attending(batch_size, columns)):
            states = self._head.step(depth, columns.tokens(depth + 1), states, attending)
        return features

    def answers(self, roots: Roots) -> Answers:
        """All modules read the columns, whatever the number of levels. A module that left columns out could never read them
        later."""
        first = (roots.num_columns - self.num_kept).clamp(min=0)
        states = self._head.target_norm(_again(roots, roots.columns(first, self.num_kept)))
        found = list[Tensor]()
        for depth in range(len(self._head.layers)):
            columns = roots.columns(first, self.num_kept - depth)
            states, tokens = states[:, : columns.count], columns.tokens(depth + 1)
            last = roots.num_columns - 1 - depth
            is_none = ((last < 0)[:, None]) & (columns.at() == 0)  # a text that is too short begins with a column of zeros
            tokens = torch.where(is_none, roots.frame.tokens[:, :1], tokens)
            attending = self._attending(roots.frame.batch_size, columns)[depth]
            states = self._head.step(depth, tokens, states.masked_fill(is_none[..., None], 0.0), attending)
            found.append(chosen(states, (last - first).clamp(min=0)[:, None]))
        return _ChainAnswers(self, self._head, roots, found[: roots.num_levels])

    def behind(self, roots: Roots, depth: int, asked: Asked) -> SlotAttending:
        columns = roots.columns((roots.num_columns - depth).clamp(min=1), asked.tokens.shape[1])
        return self._attending(roots.frame.batch_size, columns, asked.sights)[depth]


@final
class _ChainAnswers(Answers):
    """Keeps, for every node, the states from which its modules continue."""

    def __init__(self, memory: ChainMemory, head: CausalMtp, roots: Roots, found: list[Tensor]) -> None:
        """``found`` holds [B, 1, H] per module."""
        self._memory, self._head, self._roots, self._all, self._depth = memory, head, roots, found, 0

    def root(self) -> Tensor:
        return self._head.readout(0, self._all[0]).float()

    def below(self, asked: Asked) -> Tensor:
        self._depth += 1
        above = [chosen(states, asked.above) for states in self._all]
        for depth in range(len(self._all)):
            states = torch.zeros_like(above[depth])  # of modules that nothing deeper goes on from
            if depth >= self._depth:
                attending = self._memory.behind(self._roots, depth, asked)
                states = self._head.step(depth, asked.tokens, above[depth - 1], attending)
            self._all[depth] = torch.cat([self._all[depth], states], 1)
        newest = self._all[self._depth][:, -asked.tokens.shape[1] :]
        return self._head.readout(self._depth, newest).float()


@final
class TrigramMemory(LayerMemory):
    """Chimera's layer over the target's states. The root is evaluated too, so guesses follow it."""

    def __init__(self, head: ChimeraHead) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=1)
        self._head, self.width = head, head.config.hidden_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        known = self._head.target_norm(features)
        self._attending(batch_size, columns)[0].put(*self._head.entries(known))
        return known

    def answers(self, roots: Roots) -> Answers:
        return _TrigramAnswers(self, self._head, roots)

    def encoded(self, roots: Roots, grams: Tensor, sights: Sights, *, behind: int) -> Tensor:
        """[B, M, H] output of the layer at nodes with the last tokens ``grams`` [B, M, 3]. Later nodes see it."""
        columns = roots.columns(roots.num_columns + behind, grams.shape[1])
        attending = self._attending(roots.frame.batch_size, columns, sights)[0]
        found = self._head.layer(self._head.encoded(grams, roots.newest.dtype), attending)
        attending.put(*self._head.entries(found))
        return found


@final
class _TrigramAnswers(Answers):
    """Keeps the last tokens on the path to every node."""

    def __init__(self, memory: TrigramMemory, head: ChimeraHead, roots: Roots) -> None:
        self._memory, self._head, self._roots, self._depth = memory, head, roots, 0
        back = torch.arange(1 - NUM_TOKENS, 1, device=roots.tokens.device)
        places = (roots.frame.lengths[:, None] - 1 + back).clamp(min=0)  # the first stands for those before it
        self._grams = roots.frame.tokens.gather(1, places)[:, None]

    def root(self) -> Tensor:
        return self._read_off(self._memory.encoded(self._roots, self._grams, CHAIN, behind=0))

    def below(self, asked: Asked) -> Tensor:
        self._depth += 1
        grams = torch.cat([chosen(self._grams, asked.above)[..., 1:], asked.tokens[..., None]], -1)
        self._grams = torch.cat([self._grams, grams], 1)
        return self._read_off(self._memory.encoded(self._roots, grams, asked.sights, behind=1))

    def _read_off(self, found: Tensor) -> Tensor:
        known = self._roots.newest.expand(-1, found.shape[1], -1)
        return self._head.readout(self._depth, torch.cat([known, found], -1)).float()
