"""How the keys of a pass are cut into pieces, for layers of each window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models.attention.tree_cut import cut_for, latent_cut
from outrider.models.attention.tree_tiles import Bounds, KeySplit
from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import ModelConfig
from outrider.models.gpu.limits import can_go_wide
from outrider.models.gpu.pages import PAGE_LEN


def bounds_of(config: ModelConfig, layers: Sequence[LayerWeights]) -> list[Bounds]:
    """The window of every layer. A window as long as the context counts as none."""
    windows = [0 if window is None or window >= config.max_len else window for window in config.windows]
    cap = config.attention_softcap or 0.0
    return [Bounds(window, cap, layer.sinks) for window, layer in zip(windows, layers, strict=True)]


@final
class Cuts:
    """The cuts of one decoder."""

    def __init__(
        self, config: ModelConfig, bounds: Sequence[Bounds], *, is_invariant: bool, pages: tuple[int, torch.dtype]
    ) -> None:
        """``bounds`` are the windows of the layers, ``pages`` the tokens of a page and the type of its numbers."""
        self._config, self._is_invariant = config, is_invariant
        self._is_wide = pages[0] % PAGE_LEN == 0 and can_go_wide(config.head_dim, pages[1])
        self._kinds = list({each.window: each for each in bounds}.values())

    def of(self, shape: tuple[int, int], num_slots: int) -> dict[int, KeySplit]:
        """The cuts by window, for a pass of these rows and nodes whose rows end at ``num_slots`` at most."""
        if self._config.latent is not None:
            return {0: latent_cut(shape, self._config.num_heads, capacity=num_slots)}
        if self._is_invariant:  # pieces are counted from the beginning of the text
            return dict.fromkeys((each.window for each in self._kinds), self._cut(shape, num_slots, is_plain=True))
        return {
            each.window: self._cut(shape, min(num_slots, (each.window or num_slots) + shape[1]), is_plain=each.is_plain)
            for each in self._kinds
        }

    def check_depth(self, tree: TokenTree) -> None:
        """Refuse a tree that is deeper than the window. Nodes of a tree see one another whatever the window is."""
        shortest = min((each.window for each in self._kinds if each.window), default=0)
        if shortest and not tree.is_chain and tree.num_nodes > shortest and int(tree.depths.max()) >= shortest:
            raise OptionError(
                f"a tree of {tree.num_nodes} nodes is deeper than the window of {shortest}; use a shorter draft length"
            )

    def _cut(self, shape: tuple[int, int], num_slots: int, *, is_plain: bool) -> KeySplit:
        config = self._config
        if shape[1] > 64 and not self._is_invariant:
            return KeySplit(1, block_queries=64, block_keys=32 if config.head_dim > 128 else 64)
        cut = cut_for(
            shape[0],
            shape[1] * config.num_heads // config.num_kv_heads,
            num_kv_heads=config.num_kv_heads,
            capacity=num_slots,
            invariant=self._is_invariant,
            wide=self._is_wide and is_plain,
        )
        if config.head_dim <= 128:
            return cut
        return replace(cut, num_stages=2) if self._is_invariant else replace(cut, block_keys=32)  # to fit into shared memory
