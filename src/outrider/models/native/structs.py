"""The C structures of ``decoder.cpp``, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, c_float, c_int32, c_uint8, c_void_p
from functools import lru_cache

from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.interfaces import Doubt
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.core.truncation import Cut
from outrider.models.rope import RotaryTable


class MatrixStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
        *((name, c_int32) for name in ("inputs", "outputs", "is_stored")),
    ]


class LayerStruct(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "q_norm", "k_norm")
        ),
        ("rope", c_int32),
        ("window", c_int32),
    ]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("is_bf16", "has_stored", "hidden", "layers", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("mlp", "vocab")),
        *((name, c_int32) for name in ("activation", "embedding_type")),
        *((name, c_float) for name in ("norm_eps", "query_scale", "embedding_scale", "attention_cap", "final_cap")),
        *((name, c_float) for name in ("residual_scale", "logit_scale")),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", MatrixStruct),
        ("layer", POINTER(LayerStruct)),
    ]


class PassStruct(Structure):
    """One call. Arrays given to it live as long as it does."""

    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "first_layer", "last_layer", "page_len", "num_threads")),
        ("num_taps", c_int32),
        *((name, c_void_p) for name in ("tokens", "parents", "sizes", "lengths", "cache", "cosines", "sines")),
        *((name, c_void_p) for name in ("attention_on", "mlp_on", "tap_layers", "taps", "hidden", "logits")),
        ("last_only", c_int32),
        ("num_pages", c_int32),
        ("sum", c_void_p),
        ("pages", c_void_p),
        ("columns", c_int32),
    ]

    def give_tree(self, tree: TokenTree, lengths: Sequence[int]) -> None:
        self._tokens = tree.tokens.contiguous()
        self._parents = None if tree.is_chain else tree.parents.contiguous()
        self._sizes, self._lengths = (c_int32 * len(lengths))(*tree.sizes), (c_int32 * len(lengths))(*lengths)
        self.tokens, self.parents = self._tokens.data_ptr(), None if self._parents is None else self._parents.data_ptr()
        self.sizes, self.lengths = addressof(self._sizes), addressof(self._lengths)

    def give_cache(self, cache: PagedCache) -> None:
        self.columns = max(1, *map(len, cache.pages))
        padded = [page for row in cache.pages for page in (*row, *[0] * (self.columns - len(row)))]
        self._pages = (c_int32 * len(padded))(*padded)
        self.pages = addressof(self._pages)
        self.page_len, self.num_pages = cache.pool.page_len, cache.pool.num_pages
        self.cache = cache.pool.block.data_ptr()

    def give_tables(self, tables: Sequence[RotaryTable]) -> None:
        self._cosines = (c_void_p * len(tables))(*(table.cos.data_ptr() for table in tables))
        self._sines = (c_void_p * len(tables))(*(table.sin.data_ptr() for table in tables))
        self.cosines, self.sines = addressof(self._cosines), addressof(self._sines)

    def give_route(self, route: Route) -> None:
        self._on = [(c_uint8 * route.num_layers)(*part) for part in (route.attention, route.mlp)]
        self.attention_on, self.mlp_on = map(addressof, self._on)

    def give_hidden(self, hidden: Tensor) -> None:
        """[B, N, H] float32, contiguous: read where the pass begins with states, written when it ends."""
        self._hidden = hidden
        self.hidden = hidden.data_ptr()

    def give_taps(self, taps: Sequence[int], tapped: Tensor) -> None:
        """``tapped`` [taps, B, N, H], contiguous, is where their states go."""
        self.num_taps, self.tap_layers, self.taps = len(taps), addressof(_layer_array(tuple(taps))), tapped.data_ptr()


@lru_cache(maxsize=64)
def _layer_array(layers: tuple[int, ...]) -> Array[c_int32]:
    """Kept, since drafters ask for the same ones in every round."""
    return (c_int32 * len(layers))(*layers)


class CutStruct(Structure):
    _fields_ = [("top_k", c_int32), ("top_p", c_float), ("min_p", c_float)]


def cut_array(cuts: Sequence[Cut] | None) -> Array[CutStruct] | None:
    return None if cuts is None else (CutStruct * len(cuts))(*(CutStruct(cut.top_k, cut.top_p, cut.min_p) for cut in cuts))


class ChainStruct(Structure):
    _fields_ = [
        ("longest", c_int32),
        *((name, c_void_p) for name in ("depths", "temperatures", "seeds", "positions", "guesses", "cuts")),
        *((name, c_void_p) for name in ("trust", "beliefs", "levels", "places")),
    ]

    def give_doubt(self, doubt: Doubt | None) -> None:
        if doubt is None:
            return
        self._trust, self._beliefs = (c_float * len(doubt.trust))(*doubt.trust), (c_float * (len(doubt.trust) * self.longest))()
        self._prices = [(c_float * self.longest)(*prices) for prices in doubt.prices(self.longest)]
        self.trust, self.beliefs = addressof(self._trust), addressof(self._beliefs)
        self.levels, self.places = map(addressof, self._prices)

    def believed(self, depths: Sequence[int]) -> list[list[float]] | None:
        """How sure each row was of its guesses; None where nothing was doubted."""
        if not self.trust:
            return None
        return [self._beliefs[row * self.longest : row * self.longest + depth] for row, depth in enumerate(depths)]


class ChoicesStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "vocab")),
        *((name, c_void_p) for name in ("logits", "temperatures", "seeds", "positions", "depths", "out")),
    ]


class TreeStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("longest", "width", "children", "capacity")),
        ("tau", c_float),
        *((name, c_void_p) for name in ("depths", "most", "temperatures", "seeds", "positions")),
        *((name, c_void_p) for name in ("tokens", "parents", "numbers", "counts", "cuts")),
    ]


class ScanStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "heads", "head_dim", "groups", "state_size", "conv_len")),
        *((name, c_int32) for name in ("begin", "end", "columns", "numbers", "num_threads")),
        *((name, c_float) for name in ("low", "high")),
        *((name, c_void_p) for name in ("projected", "log", "state", "parents", "weight", "bias", "rate", "time_bias", "skip")),
        ("out", c_void_p),
    ]
