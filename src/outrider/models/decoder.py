"""The lean decoder: every family whose features ``features.py`` declares, as one loop over layers of plain tensors.

A pass takes the nodes of B trees, puts their keys and values after each row's committed tokens and scores every node. All
that the layers share (positions, masks, where to write) is worked out once per pass. Weights are frozen, so nothing here is
an ``nn.Module``: on small models calling modules costs more than multiplying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.page_pool import PAGE_LEN, PagePool
from outrider.cache.paged import PagedCache
from outrider.cache.slots import LayeredCache
from outrider.cache.storing import StoringTarget
from outrider.core.draft import Resume
from outrider.core.interfaces import Cache
from outrider.core.key_storage import KeyStorage, check_heads
from outrider.core.layered_target import LayeredTarget
from outrider.core.placing_target import PlacingTarget
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.attention import SightMaker
from outrider.models.decoder_weights import LayerWeights, Weights
from outrider.models.experts import ExpertsMlp
from outrider.models.features import ModelConfig
from outrider.models.latent import LatentAttention
from outrider.models.layers import (
    AnyLayer,
    Attention,
    GatedMlp,
    Layer,
    Mlp,
    ParallelLayer,
    Pass,
    PlainMlp,
    PostNormLayer,
    SelfAttention,
)
from outrider.models.linear import Linear, LinearOf, linear_of
from outrider.models.norms import norm_of, query_norm_of
from outrider.models.pools import pool_for
from outrider.models.prefill import read_in_chunks
from outrider.models.rank_sums import Joint, SummedLinear, SummedMlp
from outrider.models.rope import RotaryTable

_CHUNK = 512
"""Most tokens of a row per prefill pass. Bounds the size of masks and activations."""
_TWOFOLD = 500_000_000
"""Most parameters of a float32 model that may keep its matrices in two layouts on a CPU (2 GB more at most)."""


@final
class Decoder(LayeredTarget, PlacingTarget, StoringTarget):
    """A frozen decoder. All methods may be called from any thread, because only the cache changes."""

    def __init__(
        self, config: ModelConfig, weights: Weights, page_len: int = 0, *, bits: int = 16, joint: Joint | None = None
    ) -> None:
        """``page_len`` keeps keys and values in pages of that many tokens, which rows can share. ``bits`` 8 rounds the
        matrices of a bfloat16 model (on a CPU). With a ``joint``, config and weights are one rank's share of a model."""
        self.config = config
        self.has_windows = any(window is not None for window in config.windows)
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        twofold = sum(tensor.numel() for tensor in weights.tensors) <= _TWOFOLD
        linear = partial(linear_of, twofold=twofold, bits=bits)
        self._joint = joint
        self._layers = [_layer_of(config, index, layer, linear, joint) for index, layer in enumerate(weights.layers)]
        self._embedding = weights.embedding  # other weights are not kept: their layers hold them in layouts of their own
        self._norm = norm_of(config, weights.norm, weights.norm_bias)
        self._head = linear(weights.head)
        num_groups = config.num_heads // config.num_kv_heads
        self._sights = SightMaker(config.windows, num_groups, dtype=self.dtype)
        self._tables = [
            RotaryTable(rope, config.rotary_dim, context_len=config.max_len, dtype=self.dtype, device=self.device)
            for rope in config.ropes
        ]

        self.pool = pool_for(config, self.dtype, self.device, page_len=page_len) if page_len else None

    def pool_of_codes(self, storage: KeyStorage) -> PagePool:
        check_heads(storage, is_latent=self.config.latent is not None)
        self.pool = self.pool or pool_for(self.config, self.dtype, self.device, page_len=PAGE_LEN)
        return self.pool

    def new_cache(self, batch_size: int) -> ContiguousCache | PagedCache:
        if self.pool is not None:
            return PagedCache.empty(self.pool, batch_size)
        config = self.config
        shape, sides = (batch_size, config.num_kv_heads, config.head_dim), config.cache_sides
        return ContiguousCache.empty(config.num_layers, shape, dtype=self.dtype, device=self.device, sides=sides)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        def run(tree: TokenTree) -> Mapping[int, Tensor]:
            cache.reserve(tree.num_nodes)
            with torch.inference_mode():
                return self._climb(self._entry(tree), self._pass(tree, cache), taps=taps)[1]

        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return read_in_chunks(rows, cache, run, chunk_len=_CHUNK, taps=taps, empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            if resume is None:
                hidden, tapped = self._climb(self._entry(tree, start), self._pass(tree, cache, start), taps=taps)
            else:
                assert start == 0, "a pass goes on from earlier layers or from earlier nodes, not from both"
                hidden, tapped = self._resumed(tree, cache, resume, taps=taps)
            logits = self.logits(hidden).view(tree.batch_size, tree.num_nodes - start, -1)
        return Scores(logits, tapped)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        assert route.num_layers == self.num_layers, "a route is of one model"
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            step, first = self._pass(tree, cache, start), 0 if begun is None else begun.layer
            hidden = self._entry(tree, start) if begun is None else begun.hidden.flatten(0, 1)
            for index in range(first, self.num_layers):
                hidden = self._layers[index].part(hidden, step, attends=route.attention[index], feeds=route.mlp[index])
        return hidden.view(tree.batch_size, tree.num_nodes - start, -1)

    def placed(self, positions: Sequence[int] | Tensor) -> Decoder:
        twin = copy(self)
        twin._tables = [table.placed(positions) for table in self._tables]
        return twin

    def relaid(self, lay: Callable[[Sequence[AnyLayer]], Sequence[AnyLayer]], joint: Joint) -> Decoder:
        """A decoder on the same weights with layers made by ``lay``, and an embedding table divided as ``joint`` says."""
        twin = copy(self)
        twin._layers, twin._joint = list(lay(self._layers)), joint
        twin.num_layers = len(twin._layers)
        return twin

    def queries(self, layer: int, hidden: Tensor, begin: int) -> Tensor:
        """[Hq, N, D] queries of a layer for a row's tokens from ``begin`` on, from the layer's input [N, H]."""
        end = begin + len(hidden)
        for table in self._tables:
            table.reach(end)
        rotations = [(table.cos[begin:end][None, None], table.sin[begin:end][None, None]) for table in self._tables]
        return self._layers[layer].queries(hidden, (*rotations, None))

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] input of the first layer."""
        embedded = self._embedding[tokens] if self._joint is None else self._joint.embed(self._embedding.__getitem__, tokens)
        scale = self.config.embedding_scale
        return embedded if scale == 1.0 else embedded * torch.tensor(scale, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from the last layer's output [..., H], the final norm included."""
        logits = self._head(self._norm(hidden))
        if self.config.logit_scale != 1.0:
            logits = logits.mul_(self.config.logit_scale)
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _entry(self, tree: TokenTree, start: int = 0) -> Tensor:
        """[B * N, H] input of the first layer at the N nodes from ``start`` on."""
        return self.embed(tree.tokens[:, start:].reshape(-1))

    def _climb(
        self, hidden: Tensor, step: Pass, *, first: int = 0, last: int | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B * N, H] states after layers ``first`` to ``last`` (default: the top), and the tapped states [B, N, H] on the
        way."""
        shape = (step.batch_size, step.num_nodes, self.config.hidden_size)
        end = self.num_layers if last is None else last
        tapped: dict[int, Tensor] = {}
        for index in range(first, end):
            if index in taps:
                tapped[index] = hidden.view(shape)
            hidden = self._layers[index](hidden, step)
        if end in taps:
            tapped[end] = hidden.view(shape)
        return hidden, tapped

    def _resumed(
        self, tree: TokenTree, cache: Cache, resume: Resume, *, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the first layers for the nodes that have not passed them, then the other layers for all nodes."""
        begun, hidden = resume.num_nodes, resume.hidden
        if begun < tree.num_nodes:
            cache.reserve(tree.num_nodes, start=begun)
            rest, _ = self._climb(self._entry(tree, begun), self._pass(tree, cache, begun), last=resume.layer)
            hidden = torch.cat([hidden, rest.view(tree.batch_size, -1, hidden.shape[2])], 1)
        cache.reserve(tree.num_nodes)
        return self._climb(hidden.flatten(0, 1), self._pass(tree, cache), first=resume.layer, taps=taps)

    def _pass(self, tree: TokenTree, cache: Cache, start: int = 0) -> Pass:
        assert isinstance(cache, LayeredCache), "a Decoder works on caches that layers can write to"
        lengths, num_nodes = cache.lengths, tree.num_nodes - start
        rotations = [self._rotation(table, tree, lengths, start) for table in self._tables]
        return Pass(tree.batch_size, num_nodes, cache, (*rotations, None), self._sights(tree, lengths, start))

    def _rotation(self, table: RotaryTable, tree: TokenTree, lengths: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1 or B, 1, N, D] at the nodes' positions: row length plus depth."""
        longest, num_nodes = max(lengths), tree.num_nodes
        table.reach(longest + num_nodes)
        if tree.is_chain and min(lengths) == longest:
            nodes = slice(longest + start, longest + num_nodes)
            return table.cos[nodes][None, None], table.sin[nodes][None, None]
        positions = tree.depths[:, start:] + torch.tensor(lengths, device=self.device)[:, None]
        return table.cos[positions][:, None], table.sin[positions][:, None]


def _layer_of(config: ModelConfig, index: int, weights: LayerWeights, linear: LinearOf, joint: Joint | None) -> AnyLayer:
    attention = _attention_of(config, index, weights, linear, joint)
    mlp = _mlp_of(config, weights, linear, joint)
    first = norm_of(config, weights.attention_norm, weights.attention_norm_bias)
    second = norm_of(config, weights.mlp_norm, weights.mlp_norm_bias)
    if config.parallel:
        return ParallelLayer(attention, mlp, first, None if config.one_norm else second)
    if config.post_norms:
        after = norm_of(config, weights.attention_post_norm), norm_of(config, weights.mlp_post_norm)
        return PostNormLayer(attention, mlp, first, second, *after)
    if config.residual_scale != 1.0:
        scaled = partial(torch.mul, other=config.residual_scale)
        return PostNormLayer(attention, mlp, first, second, scaled, scaled)
    return Layer(attention, mlp, first, second)


def _attention_of(config: ModelConfig, index: int, weights: LayerWeights, linear: LinearOf, joint: Joint | None) -> Attention:
    out = _summed(linear(weights.out, weights.out_bias), joint)
    if config.latent is not None:
        return LatentAttention(config, index, weights, linear=linear, out=out)
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = query_norm_of(config, weights.q_norm), query_norm_of(config, weights.k_norm)
    qkv = linear(weights.qkv, weights.qkv_bias)
    return SelfAttention(config, index, qkv=qkv, out=out, norms=norms, sinks=weights.sinks)


def _summed(share: Linear, joint: Joint | None) -> Linear:
    return share if joint is None else SummedLinear(share, joint)


def _mlp_of(config: ModelConfig, weights: LayerWeights, linear: LinearOf, joint: Joint | None) -> Mlp:
    if weights.router is not None:
        shared = None
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            shared = GatedMlp(config, gate_up=linear(weights.shared_gate_up), down=linear(weights.shared_down))
        experts = ExpertsMlp(config, weights, shared)
        return experts if joint is None else SummedMlp(experts, joint)
    first, down = linear(weights.gate_up, weights.gate_up_bias), _summed(linear(weights.down, weights.down_bias), joint)
    return GatedMlp(config, gate_up=first, down=down) if config.gated else PlainMlp(config, up=first, down=down)
