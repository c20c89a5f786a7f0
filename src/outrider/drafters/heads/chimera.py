"""Chimera: trees from the last three tokens on the way to a node, and one layer that sees the whole context.

The memory of the text is keys and values of the target's states. A node's trigram attends to them, to the layer's keys and
values of the node's ancestors, and to itself. A node costs one pass of the layer, as in EAGLE. The target's state before the
root enters every output. (Zeng et al. 2024, arXiv 2402.15758; the module is ``models/heads/chimera.py``.)

    o(node) = layer(g(last three tokens);  h_{<= t}, o(ancestors), g),      q(. | node at depth d) = softmax(V_d [h_t ; o])

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.models.attention.parts import attend_part
from outrider.models.heads.chimera import KIND, NUM_TOKENS, ChimeraHead
from outrider.models.heads.layer import Attending
from outrider.models.layers import rotate

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class Chimera(HeadDrafter):
    """Trees from trigrams in their context."""

    def __init__(self, head: ChimeraHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.text_attention import TrigramMemory  # needs triton

        del max_depth
        return TrigramMemory(self.head)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> ChimeraGrowth:
        del max_depth
        known = read_pending(state, read_columns(state, context), partial(self._read, state))
        return ChimeraGrowth(self.head, context, state, known)

    def _read(self, state: HeadState, columns: NewColumns, chain: TokenTree) -> Tensor:
        assert state.cache is not None
        known = self.head.target_norm(columns.features)
        self._layer.attending(chain, state.cache).put(*self.head.entries(known))
        return known


@final
class ChimeraGrowth(HeadGrowth):
    """Keeps the trigrams of expanded nodes, and the keys and values that the layer computed from them."""

    def __init__(self, head: ChimeraHead, context: Context, state: HeadState, known: Tensor) -> None:
        super().__init__(head, context)
        assert state.cache is not None
        self._chimera, self._known = head, known
        self._lengths = torch.tensor(state.cache.lengths, device=context.device)[:, None]
        self.committed = state.cache.entries(0)
        slots = torch.arange(self.committed[0].shape[2], device=context.device)
        self.held = slots < self._lengths
        self.own = tuple(part[:, :, :0] for part in self.committed)
        """[B, heads, N, D] keys and values of the expanded nodes, the root included."""
        self._grams = torch.tensor([_last(row) for row in context.tokens], device=context.device)[:, None]

    def _root_states(self) -> Tensor:
        return self._asked(self._grams)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self._grams.gather(1, parents[..., None].expand(-1, -1, NUM_TOKENS))
        grams = torch.cat([above[..., 1:], tokens[..., None]], -1)
        self._grams = torch.cat([self._grams, grams], 1)
        return self._asked(grams)

    def _asked(self, grams: Tensor) -> Tensor:
        """[B, M, 2H] states of the newest nodes, whose last tokens are ``grams`` [B, M, 3]."""
        head, known, count = self._chimera, self._known, grams.shape[1]
        rotation = head.rotations.at((self._lengths + self.depth).expand(-1, count), known.dtype)
        found = head.layer(head.encoded(grams, known.dtype), _NodeAttending(self, rotation))
        keys, values = head.entries(found)
        self.own = tuple(torch.cat(pair, 2) for pair in zip(self.own, (rotate(keys, rotation), values), strict=True))
        return torch.cat([known.expand(-1, count, -1), found], -1)

    def sight(self, count: int) -> Tensor:
        """[B, M, S + N + M] attention mask of the newest nodes: the text, their ancestors, themselves."""
        ancestors = self._tree(self.tokens, self.parents).ancestors[:, -count:, :-count]
        alone = torch.eye(count, dtype=torch.bool, device=ancestors.device).expand(len(ancestors), -1, -1)
        return torch.cat([self.held[:, None].expand(-1, count, -1), ancestors, alone], 2)


@final
class _NodeAttending(Attending):
    """Attention of the newest nodes of a tree. Each node's own key and value come from its trigram."""

    def __init__(self, growth: ChimeraGrowth, rotation: tuple[Tensor, Tensor]) -> None:
        self._growth, self._rotation = growth, rotation

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        growth, config = self._growth, self._growth.head.config.layer
        assert config is not None
        parts = zip(growth.committed, growth.own, (rotate(keys, self._rotation), values), strict=True)
        all_keys, all_values = (torch.cat(part, 2) for part in parts)
        queries, sight = rotate(queries, self._rotation), growth.sight(queries.shape[2])
        return attend_part(queries, all_keys, all_values, scale=config.query_scale, sight=sight).seen


def _last(row: Sequence[int]) -> list[int]:
    """A text's last three tokens. A shorter text repeats its first token."""
    return [*[row[0]] * (NUM_TOKENS - len(row)), *row[-NUM_TOKENS:]]


def build(parts: Parts) -> Drafter:
    return Chimera(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a trigram encoder and one full-context layer before a head per guess (trained)",
    paper="Zeng et al. 2024, Chimera (arXiv 2402.15758)",
    drafter=Chimera,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
