"""A decoder with recurrent layers as a target.

It scores trees as every target does: in one pass, with the tree's mask for attention layers and the tree scan for the others.
Only the cache differs, because a recurrent layer has no key per token. So methods that run some of the target's layers alone
(early exits, skipped layers) cannot use such a target: their guesses would need a separate state in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.recurrent import RecurrentCache
from outrider.core.interfaces import Cache, Target
from outrider.core.resume import Resume
from outrider.core.scores import Scores
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models.attention import SightMaker
from outrider.models.layers import Pass
from outrider.models.linear import linear_of
from outrider.models.prefill import read_in_chunks
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.families import FAMILIES
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.tensors import Tensors, sums_dtype
from outrider.models.rope import RotaryTable
from outrider.models.weights import TensorSource

_CHUNK = 128
"""Most tokens of a row per prefill pass: a pass compares every token with every other one."""


@final
class RecurrentDecoder(Target):
    """A frozen decoder whose layers are recurrent, or partly so. What changes lives in the cache."""

    traits = TargetTraits(
        why_together=" (a recurrent state holds what every layer made of every token, so no part of them can run ahead)"
    )

    def __init__(
        self,
        config: RecurrentConfig,
        source: TensorSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        fast: bool = True,
    ) -> None:
        """``fast``: with native scans or kernels, where there are any."""
        self.config = config
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = torch.device(device), dtype
        family, shape = FAMILIES[config.family], (config.vocab_size, config.hidden_size)
        whole = Tensors(source, dtype, self.device, config.norm_eps, family.norm_offset, fast=fast, scaled=config.scaled)
        inner = whole.below(family.prefix)
        names = [name for name in family.embeddings if inner.has(f"{name}.weight")]
        self._embedding = inner.take(f"{(names or family.embeddings)[0]}.weight", *shape)
        layers = inner.below("layers")
        self._layers = [family.layer(config, index, layers.below(str(index))) for index in range(config.num_layers)]
        self._norm = inner.norm(family.norm, config.hidden_size)
        self._head = linear_of(self._embedding, twofold=True) if config.tied_head else whole.linear("lm_head", *shape)
        self._attending = None if config.attention is None else _Attending(config, dtype, self.device)

    def new_cache(self, batch_size: int) -> RecurrentCache:
        config, attention = self.config, self.config.attention
        shape = (batch_size, 1, 1) if attention is None else (batch_size, attention.num_kv_heads, attention.head_dim)
        keys = ContiguousCache.empty(config.num_attention_layers, shape, dtype=self.dtype, device=self.device)
        return RecurrentCache.empty(config.scan, keys, dtype=sums_dtype(self.dtype))

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        def run(tree: TokenTree) -> Mapping[int, Tensor]:
            return self._run(tree, cache, taps=taps)[1]

        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return read_in_chunks(rows, cache, run, chunk_len=_CHUNK, taps=taps, empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert resume is None, "only a LayeredTarget can go on from earlier layers"
        hidden, tapped = self._run(tree, cache, taps=taps, start=start)
        return Scores(self.logits(hidden), tapped)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from the last layer's output [..., H], the final norm included."""
        flat = self._norm(hidden.reshape(-1, self.config.hidden_size)).to(self.dtype)
        return self._head(flat).view(*hidden.shape[:-1], self.vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] what enters the first layer."""
        return self._embedding[tokens]

    @torch.inference_mode()
    def _run(self, tree: TokenTree, cache: Cache, *, taps: Sequence[int], start: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, N, H] after the last layer for nodes ``start``.., and the tapped states on the way."""
        assert isinstance(cache, RecurrentCache), "a RecurrentDecoder works on the caches it made"
        cache.reserve(tree.num_nodes, start=start)
        step, shape = self._pass(tree, cache, start), (tree.batch_size, tree.num_nodes - start, -1)
        hidden = self.embed(tree.tokens[:, start:].reshape(-1))
        hidden = hidden.to(sums_dtype(self.dtype)) if self.config.wide_residual else hidden
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped[index] = hidden.to(self.dtype).view(shape)
            hidden = layer(hidden, step, self.dtype)
        if self.num_layers in taps:
            tapped[self.num_layers] = hidden.to(self.dtype).view(shape)
        return hidden.view(shape), tapped

    def _pass(self, tree: TokenTree, cache: RecurrentCache, start: int) -> RecurrentPass:
        attention = None if self._attending is None else self._attending(tree, cache.attention, start)
        return RecurrentPass(cache, attention, tree, start)


class _Attending:
    """Positions and masks of the attention layers."""

    def __init__(self, config: RecurrentConfig, dtype: torch.dtype, device: torch.device) -> None:
        assert config.attention is not None
        attention = config.attention
        self._table = RotaryTable(
            attention.ropes[0], attention.head_dim, context_len=config.max_len, dtype=dtype, device=device
        )
        self._sights = SightMaker((None,), attention.num_heads // attention.num_kv_heads, dtype=dtype)

    def __call__(self, tree: TokenTree, cache: ContiguousCache, start: int) -> Pass:
        self._table.reach(max(cache.lengths) + tree.num_nodes)
        lengths = torch.tensor(cache.lengths, device=tree.tokens.device)[:, None]
        positions = tree.depths[:, start:] + lengths
        rotation = self._table.cos[positions][:, None], self._table.sin[positions][:, None]
        sights = self._sights(tree, cache.lengths, start)
        return Pass(tree.batch_size, tree.num_nodes - start, cache, (rotation, None), sights)
