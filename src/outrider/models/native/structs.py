"""The C structures of ``decoder.cpp``, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, c_double, c_float, c_int32, c_uint8, c_void_p
from functools import lru_cache

from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.interfaces import Doubt
from outrider.core.route import Route
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.rope import RotaryTable


class MatrixStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
        *((name, c_int32) for name in ("inputs", "outputs", "is_stored")),
        ("order", c_void_p),
    ]


class ExpertsStruct(Structure):
    _fields_ = [
        ("router", MatrixStruct),
        ("correction", c_void_p),
        *((name, POINTER(MatrixStruct)) for name in ("gate_up", "down")),
        *((name, MatrixStruct) for name in ("shared_gate_up", "shared_down")),
        *((name, c_int32) for name in ("count", "chosen", "groups", "chosen_groups", "group_best", "by_sigmoid")),
        ("normalised", c_int32),
        ("scale", c_float),
    ]


class LatentStruct(Structure):
    _fields_ = [
        ("query_up", MatrixStruct),
        *((name, POINTER(MatrixStruct)) for name in ("key_up", "value_up")),
        *((name, c_void_p) for name in ("norm", "query_norm")),
        *((name, c_int32) for name in ("rank", "nope_dim", "rope_dim", "value_dim")),
        ("norm_eps", c_float),
    ]


class LayerStruct(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "q_norm", "k_norm")
        ),
        *((name, c_void_p) for name in ("attention_norm_bias", "mlp_norm_bias", "beside_norm", "sinks")),
        ("experts", POINTER(ExpertsStruct)),
        ("latent", POINTER(LatentStruct)),
        ("rope", c_int32),
        ("window", c_int32),
    ]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("is_bf16", "has_stored", "hidden", "layers", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("mlp", "vocab")),
        *((name, c_int32) for name in ("activation", "embedding_type")),
        *((name, c_int32) for name in ("layer_norms", "gated", "parallel", "query_span")),
        *((name, c_float) for name in ("norm_eps", "query_scale", "embedding_scale", "attention_cap", "final_cap")),
        *((name, c_float) for name in ("residual_scale", "logit_scale")),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("norm_bias", c_void_p),
        ("head", MatrixStruct),
        ("entry", MatrixStruct),
        ("layer", POINTER(LayerStruct)),
    ]


class PassStruct(Structure):
    """One call of the native pass. Arrays given to it must live as long as it does."""

    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "first_layer", "last_layer", "page_len", "num_threads")),
        ("num_taps", c_int32),
        *((name, c_void_p) for name in ("tokens", "parents", "sizes", "lengths", "cache", "cosines", "sines")),
        *((name, c_void_p) for name in ("attention_on", "mlp_on", "tap_layers", "taps", "hidden", "logits")),
        ("last_only", c_int32),
        ("num_pages", c_int32),
        ("sum", c_void_p),
        ("pages", c_void_p),
        *((name, c_int32) for name in ("columns", "num_spoken", "spoken_nodes")),
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
        """[B, N, H] float32, contiguous: read if the pass starts from states, and written when it ends."""
        self._hidden = hidden
        self.hidden = hidden.data_ptr()

    def give_taps(self, taps: Sequence[int], tapped: Tensor) -> None:
        """``tapped`` [taps, B, N, H], contiguous, receives the states of the tapped layers."""
        self.num_taps, self.tap_layers, self.taps = len(taps), addressof(_layer_array(tuple(taps))), tapped.data_ptr()


@lru_cache(maxsize=64)
def _layer_array(layers: tuple[int, ...]) -> Array[c_int32]:
    """The structures of these layers, which are kept, because drafters ask for the same ones in every round."""
    return (c_int32 * len(layers))(*layers)


class CutStruct(Structure):
    _fields_ = [("top_p", c_double), ("typical_p", c_double), ("top_k", c_int32), ("min_p", c_float)]


class ShapingStruct(Structure):
    """Everything that shapes laws. Arrays given to it must live as long as it does."""

    _held: Sequence[Tensor] = ()

    _fields_ = [
        ("vocab", c_int32),
        *((name, c_void_p) for name in ("temperatures", "cuts", "bias", "ends", "missing")),
        *((name, c_void_p) for name in ("penalties", "in_output", "in_prompt")),
    ]

    @staticmethod
    def of(tempering: Tempering, vocab_size: int) -> ShapingStruct:
        """The structure for a model of ``vocab_size`` tokens. The arrays may have more columns."""
        has_arrays = any(one is not None for one in (tempering.bias, tempering.minimum, tempering.counted))
        return ShapingStruct._made(tempering, vocab_size) if has_arrays else _kept_shaping(tempering, vocab_size)

    @staticmethod
    def _made(tempering: Tempering, vocab_size: int) -> ShapingStruct:
        shaping, temperatures = ShapingStruct(vocab_size), tempering.temperatures
        shaping._temperatures = (c_float * len(temperatures))(*temperatures)
        shaping.temperatures = addressof(shaping._temperatures)
        if tempering.cuts is not None:
            cuts = (CutStruct(cut.top_p, cut.typical_p, cut.top_k, cut.min_p) for cut in tempering.cuts)
            shaping._cuts = (CutStruct * len(temperatures))(*cuts)
            shaping.cuts = addressof(shaping._cuts)
        if tempering.bias is not None:
            shaping.bias = shaping._hold(tempering.bias)
        if tempering.minimum is not None:
            shaping.ends, shaping.missing = shaping._hold(tempering.minimum.ends), shaping._hold(tempering.minimum.missing)
        if tempering.counted is not None:
            counted = tempering.counted
            shaping.penalties, shaping.in_prompt = shaping._hold(counted.penalties), shaping._hold(counted.in_prompt)
            shaping.in_output = shaping._hold(counted.in_output)
        return shaping

    def _hold(self, tensor: Tensor) -> int:
        """The address of [B, ...] numbers, which are kept as long as this structure. Arrays with a column per token also report
        the number of columns."""
        tensor = tensor.contiguous()
        self._held = [*self._held, tensor]
        self.vocab = max(self.vocab, tensor.shape[1] if tensor.dim() == 2 else 0)
        return tensor.data_ptr()


@lru_cache(maxsize=8)
def _kept_shaping(tempering: Tempering, vocab_size: int) -> ShapingStruct:
    """Structures without large arrays are kept, because every round of a batch has the same tempering."""
    return ShapingStruct._made(tempering, vocab_size)  # pyright: ignore[reportPrivateUsage]


class ChainStruct(Structure):
    _fields_ = [
        ("longest", c_int32),
        *((name, c_void_p) for name in ("depths", "shaping", "seeds", "positions", "guesses")),
        *((name, c_void_p) for name in ("trust", "beliefs", "levels", "places", "ids")),
    ]

    def give_doubt(self, doubt: Doubt | None) -> None:
        if doubt is None:
            return
        self._trust, self._beliefs = (c_float * len(doubt.trust))(*doubt.trust), (c_float * (len(doubt.trust) * self.longest))()
        self._prices = [(c_float * self.longest)(*prices) for prices in doubt.prices(self.longest)]
        self.trust, self.beliefs = addressof(self._trust), addressof(self._beliefs)
        self.levels, self.places = map(addressof, self._prices)

    def believed(self, depths: Sequence[int]) -> list[list[float]] | None:
        """The confidence of each row in its guesses; None if nothing was doubted."""
        if not self.trust:
            return None
        return [self._beliefs[row * self.longest : row * self.longest + depth] for row, depth in enumerate(depths)]


class ChoicesStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "vocab")),
        *((name, c_void_p) for name in ("logits", "tokens", "parents", "shaping", "seeds", "positions", "allowed", "out")),
        *((name, c_void_p) for name in ("sizes", "walks")),
    ]


class TreeStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("longest", "width", "children", "capacity")),
        ("tau", c_float),
        *((name, c_void_p) for name in ("depths", "most", "shaping", "seeds", "positions")),
        *((name, c_void_p) for name in ("tokens", "parents", "numbers", "counts", "ids")),
        ("in_beams", c_int32),
    ]


class ScanStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "heads", "head_dim", "groups", "state_size", "conv_len")),
        *((name, c_int32) for name in ("begin", "end", "columns", "numbers", "num_threads")),
        *((name, c_float) for name in ("low", "high")),
        *((name, c_void_p) for name in ("projected", "log", "state", "parents", "weight", "bias", "rate", "time_bias", "skip")),
        ("out", c_void_p),
    ]
