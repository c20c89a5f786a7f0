"""The lean decoder on a GPU, at the speed of reading its weights: fused kernels, and a CUDA graph for every shape of pass.

The oracle is ``models/decoder.py``. Here fused kernels do the work, nine a layer: residual sum with norms, rotation with cache
write, activation with product. Tree attention reads lengths on the device. One decoder for every family: ``known.py`` says what
it does not have. Heads are widened to a power of two. ``forward`` waits for nothing on the host, so it can be captured alone
(``score``) or as part of a whole round.

With numerics="invariant", keys are cut at fixed places and added up in the order of the text, and long passes use the kernels
of short ones. So a node's score is the same bits, whatever else is in the pass. With "fast", the fastest kernels are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.cache.storing import StoringTarget
from outrider.core.interfaces import Cache
from outrider.core.key_storage import KeyStorage
from outrider.core.layered_target import LayeredTarget
from outrider.core.placing_target import PlacingTarget
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models.attention.tree_tiles import Rows, Sights, paths_of
from outrider.models.attention.tree_triton import pack_words
from outrider.models.features import ModelConfig
from outrider.models.gpu.chunks import chunk_for
from outrider.models.gpu.cuts import Cuts, bounds_of
from outrider.models.gpu.experts import experts_mlp
from outrider.models.gpu.finish import Finish
from outrider.models.gpu.known import check_storage, head_dim_for
from outrider.models.gpu.latent import heads_of
from outrider.models.gpu.pages import PAGE_LEN, flat_rows, hold_enough, rows_in
from outrider.models.gpu.planes_matmul import embedded_rows
from outrider.models.gpu.products import multiply
from outrider.models.gpu.replay import PassGraphs
from outrider.models.gpu.small_batch_matmul import Ending, NormParts
from outrider.models.gpu.stream import Step, Stream
from outrider.models.gpu.sums import add_norm, ended_logits, summed
from outrider.models.gpu.tiles import Kind
from outrider.models.lent_pages import lend
from outrider.models.packed import LayerMatrices, Matrix, matrices_of
from outrider.models.padded_heads import with_wider_heads
from outrider.models.pools import pool_for
from outrider.models.prefill import read_in_chunks
from outrider.models.rank_sums import ALONE, Joint
from outrider.models.rope import RotaryTable
from outrider.models.weights import Weights

_LONGEST, _BEYOND = 1 << 17, 512
"""Most tokens of a text in captured rounds, and of a tree after it."""


@final
class FastDecoder(LayeredTarget, PlacingTarget, StoringTarget):
    """A frozen decoder with one pool of pages for all its caches; passes of one decoder must not run side by side."""

    chunk_len = 1024  # tokens of a prompt that one pass reads, where there is no other

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        numerics: str = "fast",
        bits: int = 16,
        page_len: int = PAGE_LEN,
        joint: Joint = ALONE,
    ) -> None:
        """``bits`` (16, 8, 4) of the matrices; ``page_len`` (a power of two) tokens of a page of keys. With a ``joint`` these
        are one rank's share of a model, with the vocabulary's size in ``config`` still that of the whole."""
        config, weights = with_wider_heads(config, weights, head_dim_for(config))
        self.config, self.numerics, self.joint = config, numerics, joint
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype, self.weights = weights.embedding.device, weights.dtype, matrices_of(weights, bits)
        self.traits = TargetTraits(is_invariant=numerics == "invariant", can_be_captured=joint.is_wired)
        self.pool = pool_for(config, self.dtype, self.device, page_len=page_len)
        sizes: dict[str, Any] = {"context_len": config.max_len, "dtype": self.dtype, "device": self.device}
        self._tables = [RotaryTable(rope, config.rotary_dim, **sizes) for rope in config.ropes]
        self._reach(self.most_slots)  # whole, since graphs hold its address
        self._graphs = PassGraphs()
        self._bounds, exact = bounds_of(config, weights.layers), self.traits.is_invariant
        self._heads = heads_of(config, self._tables, self._bounds, exact=exact)
        self._cuts = Cuts(config, self._bounds, is_invariant=exact, pages=(page_len, self.dtype))
        self.has_windows = any(each.window for each in self._bounds)

    def placed(self, positions: Sequence[int] | Tensor) -> FastDecoder:
        twin = copy(self)
        twin._tables = [table.placed(positions) for table in self._tables]
        twin._heads = heads_of(self.config, twin._tables, self._bounds, exact=self.traits.is_invariant)
        twin._graphs = PassGraphs()
        return twin

    def pool_of_codes(self, storage: KeyStorage) -> PagePool:
        check_storage(self.config, storage, self.device)
        return self.pool

    @property
    def page_len(self) -> int:
        """Tokens of a page."""
        return self.pool.page_len

    @property
    def most_slots(self) -> int:
        """Most tokens of a row in captured rounds, the nodes of a tree included."""
        return min(self.max_len, _LONGEST) + _BEYOND

    @property
    def num_slots(self) -> int:
        """Number of slots that the pages of the pool can serve now."""
        return min(self.most_slots, self.pool.num_pages * self.page_len)

    @property
    def room(self) -> int:
        """Number of tokens that its pages hold."""
        return hold_enough(self.pool, longest=self.most_slots).num_pages * self.page_len

    def new_cache(self, batch_size: int) -> PagedCache:
        return PagedCache.empty(hold_enough(self.pool, longest=self.most_slots), batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        assert isinstance(cache, PagedCache), "a FastDecoder works on the caches it made"
        lend(self.joint, cache, max(map(len, rows), default=0))
        self.joint.tell("prefill", rows, 0, taps)

        def run(tree: TokenTree) -> Mapping[int, Tensor]:
            cache.reserve(tree.num_nodes)
            self._reach(max(cache.lengths) + tree.num_nodes)
            with torch.inference_mode():
                return self.hidden(tree.tokens, self.step_of(tree, cache), taps=taps)[1]

        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return read_in_chunks(rows, cache, run, chunk_len=chunk_for(len(rows), self.chunk_len), taps=taps, empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        del resume  # the same scores without it
        assert isinstance(cache, PagedCache), "a FastDecoder works on the caches it made"
        self._cuts.check_depth(tree)
        with torch.inference_mode():
            logits, tapped = self._graphs.score(self, tree, cache=cache, taps=tuple(taps), start=start)
        return Scores(logits, tapped)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        assert isinstance(cache, PagedCache), "a FastDecoder works on the caches it made"
        cache.reserve(tree.num_nodes, start=start)
        with torch.inference_mode():
            hidden, _ = self.hidden(tree.tokens[:, start:], self.step_of(tree, cache, start), route=route, begun=begun)
        return hidden.view(tree.batch_size, tree.num_nodes - start, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 from the last layer's output [..., H]."""
        return self._head(Stream(hidden.reshape(-1, hidden.shape[-1]).contiguous())).view(*hidden.shape[:-1], -1)

    def _head(self, stream: Stream) -> Tensor:
        normed = stream.normed(self._norm(self.weights.norm, self.weights.norm_bias))
        return ended_logits(self._product(normed, self.weights.head, Kind.HEAD), self.config)

    def step_of(self, tree: TokenTree, cache: PagedCache, start: int = 0) -> Step:
        """The data that all layers of a pass share, for nodes ``start``.. of the tree."""
        words = None if tree.is_chain else pack_words(tree.ancestors)[:, start:].contiguous()
        depths = None if tree.is_chain else tree.depths[:, start:].int().contiguous()
        paths = paths_of(tree.ancestors)[:, start:].contiguous() if self.traits.is_invariant and words is not None else None
        flat = flat_rows(cache, max(map(len, cache.pages))).to(self.device)
        rows, shape = rows_in(flat, cache.batch_size, self.page_len), (tree.batch_size, tree.num_nodes - start)
        return self.step(shape, rows, Sights(words, depths, start, paths), num_slots=max(cache.lengths) + tree.num_nodes)

    def step(self, shape: tuple[int, int], rows: Rows, sights: Sights, *, num_slots: int) -> Step:
        """The data of a pass whose rows, trees included, hold at most ``num_slots``: now or, in a graph, ever."""
        return Step(shape, rows, sights, self._cuts.of(shape, num_slots))

    def forward(self, tokens: Tensor, step: Step, *, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, N, V] logits of [B, N] tokens, and the tapped states. Nothing here waits for the device."""
        logits, (tapped,) = self.forward_beside([(tokens, step)], taps=taps)
        return logits, tapped

    def forward_beside(
        self, groups: Sequence[tuple[Tensor, Step]], *, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[dict[int, Tensor]]]:
        """One pass over several groups of rows of different shapes, such as trees and pieces of prompts. Returns logits of the
        first group alone, and the tapped states of each."""
        steps = [step for _, step in groups]
        stream, tapped = self._climb(torch.cat([tokens.reshape(-1) for tokens, _ in groups]), steps, taps)
        logits = self._head(stream.first(steps[0].num_nodes)).view(*steps[0].shape, -1)
        parts = {tap: states.split([step.num_nodes for step in steps]) for tap, states in tapped.items()}
        return logits, [
            {tap: states[index].view(*step.shape, -1) for tap, states in parts.items()} for index, step in enumerate(steps)
        ]

    def hidden(
        self,
        tokens: Tensor,
        step: Step,
        *,
        taps: Sequence[int] = (),
        route: Route | None = None,
        begun: Resume | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B * N, H] the last layer's output, and the tapped states [B, N, H]."""
        stream, tapped = self._climb(tokens.reshape(-1), [step], taps, route, begun)
        return stream.complete(), {tap: states.view(*step.shape, -1) for tap, states in tapped.items()}

    def _climb(
        self,
        tokens: Tensor,
        steps: Sequence[Step],
        taps: Sequence[int],
        route: Route | None = None,
        begun: Resume | None = None,
    ) -> tuple[Stream, dict[int, Tensor]]:
        """The stream after the last layer, for the tokens of all steps one after the other, and the tapped states."""
        stream = Stream(self._embedded(tokens) if begun is None else begun.hidden.flatten(0, 1).clone())
        tapped: dict[int, Tensor] = {}
        for index in range(0 if begun is None else begun.layer, self.num_layers):
            if index in taps:
                stream = Stream(stream.complete())
                tapped[index] = stream.x.clone()
            halves = (True, True) if route is None else (route.attention[index], route.mlp[index])
            if self.config.parallel:
                stream = self._side_by_side(stream, index, steps, halves)
                continue
            if halves[0]:
                stream = self._attend(stream, index, steps)
            if halves[1]:
                stream = self._feed(stream, index)
        if self.num_layers in taps:
            stream = Stream(stream.complete())
            tapped[self.num_layers] = stream.x
        return stream, tapped

    def _embedded(self, tokens: Tensor) -> Tensor:
        table, scale = self.weights.embedding, self.config.embedding_scale
        x = self.joint.embed(lambda rows: embedded_rows(table, rows, self.dtype), tokens)
        return x if scale == 1.0 else x.mul_(float(torch.tensor(scale, dtype=self.dtype)))

    def _attend(self, stream: Stream, index: int, steps: Sequence[Step]) -> Stream:
        rest = self.weights.layers[index].rest
        x = stream.normed(self._norm(rest.attention_norm, rest.attention_norm_bias))
        return self._then(stream, self._attention(x, index, steps), rest.out_bias, rest.attention_post_norm)

    def _feed(self, stream: Stream, index: int) -> Stream:
        layer = self.weights.layers[index]
        x = stream.normed(self._norm(layer.rest.mlp_norm, layer.rest.mlp_norm_bias))
        bias = None if layer.rest.router is not None else layer.rest.down_bias
        return self._then(stream, self._mlp(x, layer), bias, layer.rest.mlp_post_norm)

    def _side_by_side(self, stream: Stream, index: int, steps: Sequence[Step], halves: tuple[bool, bool]) -> Stream:
        """Attention and MLP of the same stream, for layers that run them in parallel."""
        layer = self.weights.layers[index]
        rest = layer.rest
        x = stream.normed(self._norm(rest.attention_norm, rest.attention_norm_bias))
        found = [self._attention(x, index, steps)] if halves[0] else []
        if halves[1]:
            own = self._norm(rest.mlp_norm, rest.mlp_norm_bias)
            found.append(self._mlp(x if own is None else add_norm(stream.x, None, own), layer))
        biases = [bias for bias, on in zip((rest.out_bias, rest.down_bias), halves, strict=True) if on and bias is not None]
        if not found:
            return Stream(stream.x)
        parts = torch.cat([part if part.dim() == 3 else part[None] for part in found])
        return self._then(stream, parts, sum(biases[1:], biases[0]) if biases else None)

    def _attention(self, x: Tensor, index: int, steps: Sequence[Step]) -> Tensor:
        """The output of attention that is added to the stream, from its norm."""
        layer = self.weights.layers[index]
        return self._product(self._heads(x, index, layer, self.pool.memory(index), steps), layer.out, Kind.NARROW)

    def _mlp(self, x: Tensor, layer: LayerMatrices) -> Tensor:
        """The output of the MLP, or of the experts, that is added to the stream."""
        config, rest = self.config, layer.rest
        if rest.router is not None and config.experts is not None:
            return experts_mlp(x, layer, config.experts, activation=config.activation, exact=self.traits.is_invariant)
        finish = Finish(config.activation, rest.gate_up_bias)
        inner = multiply(x, layer.gate_up, Kind.GATED, exact=self.traits.is_invariant, finish=finish, gated=config.gated)
        return self._product(inner, layer.down, Kind.NARROW)

    def _reach(self, num_slots: int) -> None:
        for table in self._tables:
            table.reach(num_slots)

    def _then(self, stream: Stream, parts: Tensor, bias: Tensor | None, norm: Tensor | None = None) -> Stream:
        """End a half layer, with the sum over ranks if there are several."""
        if self.joint is not ALONE:
            parts, bias = self.joint.sum(summed(parts, bias)), None
        return stream.then(parts, Ending(bias, self._norm(norm), self.config.residual_scale))

    def _product(self, x: Tensor, weight: Matrix, kind: Kind) -> Tensor:
        return multiply(x, weight, kind, exact=self.traits.is_invariant)

    def _norm(self, weight: Tensor | None, bias: Tensor | None = None) -> NormParts | None:
        return None if weight is None else NormParts(weight, self.config.norm_eps, bias, self.config.norm_kind == "layer")
