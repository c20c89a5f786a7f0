"""A decoder whose pass is one native call. Interface, cache and numbers are those of its twin ``models/decoder.py``.

On a CPU, a small model spends its time calling operators. A large one waits for memory, and its threads synchronise after every
operator. Here the layers are a loop in C++ over packed weights, no mask is built, and padding is not computed. Every output is
one chain of additions in a fixed order, so a node's scores do not depend on what else is in the pass. Therefore speculative and
plain decoding agree bit for bit, in bfloat16 too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import addressof, byref, c_int32
from functools import partial
from typing import final

import torch
from torch import Tensor

from outrider.cache.page_pool import PAGE_LEN
from outrider.cache.paged import PagedCache, as_one
from outrider.core.draft import Resume
from outrider.core.guessing_target import Guesses, GuessingTarget, TreeSearch
from outrider.core.interfaces import Cache, Plan
from outrider.core.layered_target import LayeredTarget
from outrider.core.placing_target import PlacingTarget
from outrider.core.reading_target import PromptPiece, ReadingTarget
from outrider.core.rng import Noise
from outrider.core.route import Route
from outrider.core.scores import Scores, StackedTaps
from outrider.core.tempering import Tempering
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import STORED_ROWS, Weights
from outrider.models.native.beside import hand_out, with_pieces
from outrider.models.native.choices import choose, gumbel_stream
from outrider.models.native.growing import Growing, GrownTrees
from outrider.models.native.known import LANES
from outrider.models.native.packed_model import PackedModel
from outrider.models.native.structs import ChainStruct, PassStruct, ShapingStruct
from outrider.models.native.sums import SumsOverRanks
from outrider.models.native.wanted import Wanted
from outrider.models.padded_heads import with_wider_heads
from outrider.models.pools import pool_for
from outrider.models.prefill import read_in_chunks
from outrider.models.rank_sums import Joint
from outrider.models.rope import RotaryTable

_CHUNK = 256
"""Most tokens of a row per prefill pass."""


@final
class NativeDecoder(LayeredTarget, GuessingTarget, PlacingTarget, ReadingTarget):
    """A frozen decoder on a CPU, with as many threads as PyTorch had when it was loaded. Passes of one process take turns."""

    most_read = _CHUNK

    traits = TargetTraits(is_invariant=True, pads=False, has_own_threads=True)

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: Weights,
        bits: int = 16,
        *,
        joint: Joint | None = None,
        page_len: int = PAGE_LEN,
        logit_type: torch.dtype = torch.float32,
    ) -> None:
        """``bits`` (16 or 8) of the matrices of a bfloat16 model; ``page_len`` (a power of two) tokens of a page of keys. With
        a ``joint``, config and weights are one rank's share. Logits are rounded to ``logit_type`` and returned as floats."""
        config, weights = with_wider_heads(config, weights, -(-config.head_dim // LANES) * LANES)
        self.config = config
        self.has_windows = any(window is not None for window in config.windows)
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device = weights.embedding.device
        self.dtype = torch.bfloat16 if weights.dtype == torch.bfloat16 else torch.float32
        self._call, self._chain, self._tree = library.outrider_pass, library.outrider_chain, library.outrider_tree
        self._call.restype = self._chain.restype = self._tree.restype = None
        self._num_threads = torch.get_num_threads()
        self.gumbel_stream, self.choose = partial(gumbel_stream, library), partial(choose, library)
        self._model = PackedModel(library, config, weights, bits, embeds=joint is None and len(weights.embedding) > 0)
        self._logit_type = logit_type
        self._ids: Tensor | None = None
        self._guessed_size = config.vocab_size
        self._sums = None if joint is None else SumsOverRanks(joint)
        self._joint = joint
        self._embedding = None if weights.embedding.dtype == STORED_ROWS else weights.embedding  # a table is of no more use
        self._embed = library.outrider_embed
        self.pool = pool_for(config, self.dtype, self.device, page_len=page_len, first_pages=1)
        self._tables = [
            RotaryTable(
                rope, config.rotary_dim, context_len=config.max_len, dtype=torch.float32, device=self.device, first_len=512
            )
            for rope in config.ropes
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrices, the head included."""
        return self._model.num_bytes

    def new_cache(self, batch_size: int) -> PagedCache:
        return PagedCache.empty(self.pool, batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        def run(tree: TokenTree) -> Mapping[int, Tensor]:
            self._own(cache).reserve_each(tree.sizes)
            return self._run(tree, cache, 0, Wanted(last=self.num_layers, taps=taps))[1]

        empty = torch.zeros(0, self.config.hidden_size, dtype=self.dtype)
        return read_in_chunks(rows, cache, run, chunk_len=_CHUNK, taps=taps, empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        self._own(cache).reserve_each(tree.sizes)
        if resume is None:
            logits, tapped = self._run(tree, cache, start, Wanted(last=self.num_layers, taps=taps, logits=True))
        else:
            assert start == 0, "a pass goes on from earlier layers or from earlier nodes, not from both"
            hidden = self._begun(tree, cache, resume)
            wanted = Wanted(first=resume.layer, last=self.num_layers, taps=taps, logits=True, hidden=hidden)
            logits, tapped = self._run(tree, cache, 0, wanted)
        assert logits is not None
        return Scores(logits, tapped)

    def score_beside(self, tree: TokenTree, cache: Cache, pieces: Sequence[PromptPiece], *, taps: Sequence[int] = ()) -> Scores:
        packed, wanted = with_pieces(tree, pieces), sorted({*taps, *(tap for piece in pieces for tap in piece.taps)})
        num_rows, num_nodes = tree.batch_size, tree.num_nodes
        with as_one([self._own(one) for one in (cache, *(piece.cache for piece in pieces))]) as together:
            together.reserve_each(packed.sizes)
            spoken = Wanted(last=self.num_layers, taps=wanted, logits=True, spoken=(num_rows, num_nodes))
            logits, tapped = self._run(packed, together, 0, spoken)
            together.commit([range(size if row >= num_rows else 0) for row, size in enumerate(packed.sizes)])
        hand_out(tapped, num_rows, pieces)
        assert logits is not None
        return Scores(logits, {tap: tapped[tap][:num_rows, :num_nodes] for tap in taps})

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        assert route.num_layers == self.num_layers, "a route is of one model"
        self._own(cache).reserve_each(tree.sizes)
        shape = (tree.batch_size, tree.num_nodes - start, self.config.hidden_size)
        hidden = torch.zeros(shape) if begun is None else begun.hidden.to(torch.float32, copy=True).contiguous()
        first = 0 if begun is None else begun.layer
        self._run(tree, cache, start, Wanted(first=first, last=route.depth, route=route, hidden=hidden))
        return hidden

    def carried(self, tree: TokenTree, cache: Cache, hidden: Tensor) -> Tensor:
        """[B, N, H] float32 states after all layers, from the input of the first, for models without an embedding."""
        self._own(cache).reserve_each(tree.sizes)
        states = hidden.to(torch.float32, copy=True).contiguous()
        self._run(tree, cache, 0, Wanted(last=self.num_layers, hidden=states))
        return states

    def placed(self, positions: Sequence[int] | Tensor) -> NativeDecoder:
        twin = copy(self)
        twin._tables = [table.placed(positions) for table in self._tables]
        return twin

    def guessing(self, ids: Tensor, vocab_size: int) -> NativeDecoder:
        """A version of this decoder for guessing. Row i of its output matrix belongs to token ``ids[i]``, and its guesses are
        such tokens."""
        twin = copy(self)
        twin._ids, twin._guessed_size = ids.to(torch.int64).contiguous(), vocab_size
        return twin

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from the last layer's output [..., H], with the final norm applied."""
        rows = hidden.float().reshape(1, -1, self.config.hidden_size).contiguous()
        tree = TokenTree.chain(torch.zeros(rows.shape[:2], dtype=torch.int64))
        out, _ = self._run(tree, None, 0, Wanted(first=self.num_layers, last=self.num_layers, logits=True, hidden=rows.clone()))
        assert out is not None
        return out.view(*hidden.shape[:-1], self.vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] input of the first layer."""
        scale = self.config.embedding_scale
        if self._embedding is None:
            return self._dequantised(tokens.contiguous())
        embedded = self._embedding[tokens] if self._joint is None else self._joint.embed(self._embedding.__getitem__, tokens)
        embedded = embedded.to(self.dtype)
        return embedded if scale == 1.0 else embedded * torch.tensor(scale, dtype=self.dtype)

    def _dequantised(self, tokens: Tensor) -> Tensor:
        rows = torch.empty(*tokens.shape, self.config.hidden_size)
        count = ctypes.c_int64(tokens.numel())
        self._embed(byref(self._model.struct), ctypes.c_void_p(tokens.data_ptr()), count, ctypes.c_void_p(rows.data_ptr()))
        return rows

    def _begun(self, tree: TokenTree, cache: Cache, resume: Resume) -> Tensor:
        """[B, N, H] input of layer ``resume.layer``, also at nodes that have not been through the layers below it."""
        begun, hidden = resume.num_nodes, resume.hidden.float()
        if begun == tree.num_nodes:
            return hidden.contiguous()
        rest = torch.zeros(tree.batch_size, tree.num_nodes - begun, self.config.hidden_size)
        self._run(tree, cache, begun, Wanted(last=resume.layer, hidden=rest))
        return torch.cat((hidden, rest), 1)

    def guess(self, rows: Sequence[Sequence[int]], cache: Cache, *, plan: Plan, tempering: Tempering, noise: Noise) -> Guesses:
        longest = max(plan.max_depth)
        tree = self._to_feed(rows, cache, ahead=longest)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        depths = (c_int32 * len(rows))(*plan.max_depth)
        shaping = ShapingStruct.of(tempering, self._guessed_size)
        given = (tensor.data_ptr() for tensor in (noise.seeds, noise.positions, tokens))
        chain = ChainStruct(longest, addressof(depths), addressof(shaping), *given)
        chain.give_doubt(plan.doubt)
        chain.ids = None if self._ids is None else self._ids.data_ptr()
        with self.pool.lock:
            call = self._pass(tree, cache, 0, Wanted(last=self.num_layers), ahead=longest)
            self._chain(byref(self._model.struct), byref(call), byref(chain))
        cache.commit([range(size + max(0, depth - 1)) for size, depth in zip(tree.sizes, depths, strict=True)])
        made = list(depths)
        return Guesses(tokens[:, : max(made)], made, chain.believed(made))

    def guess_tree(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, search: TreeSearch, plan: Plan, tempering: Tempering, noise: Noise
    ) -> tuple[TokenTree, Tensor]:
        fed = self._to_feed(rows, cache, ahead=max(plan.max_depth) * search.width)
        return self.grown(fed, cache, Growing(search, plan, tempering, noise, ids=self._ids))

    def grown(self, fed: TokenTree, cache: Cache, growing: Growing) -> tuple[TokenTree, Tensor]:
        """Grow best-first trees below chains for which the cache has room (see ``guess_tree``)."""
        grown = GrownTrees(growing, self._guessed_size)
        with self.pool.lock:
            call = self._pass(fed, cache, 0, Wanted(last=self.num_layers, hidden=growing.states), ahead=grown.depth)
            self._tree(byref(self._model.struct), byref(call), byref(grown.struct))
        cache.commit([range(size) for size in fed.sizes])
        last = torch.tensor([max(0, size - 1) for size in fed.sizes])
        return grown.below(fed.tokens.gather(1, last[:, None])[:, 0])

    def _to_feed(self, rows: Sequence[Sequence[int]], cache: Cache, *, ahead: int) -> TokenTree:
        """The rows as chains, on a cache with room for ``ahead`` more tokens. Of long ones, all but the last token is read."""
        if max(len(row) for row in rows) > _CHUNK:
            self.prefill([row[:-1] for row in rows], cache)
            rows = [row[-1:] for row in rows]
        longest = max(len(row) for row in rows)
        cache.reserve(longest + ahead)
        return TokenTree.chain(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]), [len(row) for row in rows])

    def _run(
        self, tree: TokenTree, cache: Cache | None, start: int, wanted: Wanted
    ) -> tuple[Tensor | None, Mapping[int, Tensor]]:
        """Run nodes ``start``.. through layers ``first`` to ``last``. Returns logits [B, N, V] if wanted, and the taps [B, N,
        H]."""
        batch_size, num_nodes = tree.batch_size, tree.num_nodes - start
        new = torch.zeros if tree.is_ragged else torch.empty  # what is padding is not computed
        spoken = wanted.spoken if wanted.spoken[0] else (batch_size, num_nodes)
        logits = new(*spoken, self.vocab_size) if wanted.logits else None
        taps = [tap for tap in wanted.taps if tap >= wanted.first]
        tapped = new(len(taps), batch_size, num_nodes, self.config.hidden_size) if taps else None
        with self.pool.lock:
            call = self._pass(tree, cache, start, wanted)
            if tapped is not None:
                call.give_taps(taps, tapped)
            call.logits = None if logits is None else logits.data_ptr()
            call.num_spoken, call.spoken_nodes = wanted.spoken
            self._call(byref(self._model.struct), byref(call))
        if self._sums is not None:
            self._sums.check()
        if logits is not None and logits.dtype != self._logit_type:
            logits = logits.to(self._logit_type).float()
        return logits, {} if tapped is None else StackedTaps(taps, tapped, self.dtype)

    def _pass(self, tree: TokenTree, cache: Cache | None, start: int, wanted: Wanted, *, ahead: int = 0) -> PassStruct:
        """The description of one call, on a cache with room for the pass and for ``ahead`` more tokens."""
        lengths = [0] * tree.batch_size if cache is None else cache.lengths
        for table in self._tables:
            table.reach(max(lengths) + tree.num_nodes + ahead)
        call = PassStruct(tree.batch_size, tree.num_nodes, start, wanted.first, wanted.last)
        call.num_threads = self._num_threads
        call.give_tree(tree, lengths)
        call.give_tables(self._tables)
        if cache is not None:
            call.give_cache(self._own(cache))
        if wanted.route is not None:
            call.give_route(wanted.route)
        hidden = wanted.hidden
        if self._sums is not None:
            call.sum = self._sums.address
            hidden = self._entered(tree, start, hidden) if wanted.first == 0 else hidden
        if hidden is not None:
            call.give_hidden(hidden)
        return call

    def _own(self, cache: Cache) -> PagedCache:
        assert isinstance(cache, PagedCache) and cache.pool is self.pool, "a decoder works on the caches it made"
        return cache

    def _entered(self, tree: TokenTree, start: int, hidden: Tensor | None) -> Tensor:
        """[B, N, H] float32 input of the first layer of a share, written to ``hidden`` if given."""
        assert self._joint is not None and self._embedding is not None
        states = self._joint.embed(self._embedding.__getitem__, tree.tokens[:, start:]).float() * self.config.embedding_scale
        return states.contiguous() if hidden is None else hidden.copy_(states)
