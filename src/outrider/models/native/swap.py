"""A decoder that starts at once in PyTorch and goes native when the compiler is done.

Only the first start on a machine has anything to wait for. Both halves work on one cache layout, and the change is made when
the next cache is asked for, that is between requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.guessing_target import Guesses, GuessingTarget, TreeSearch
from outrider.core.interfaces import Cache, Plan
from outrider.core.layered_target import LayeredTarget
from outrider.core.rng import Noise
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.truncation import Tempering
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.native.build import BUILD
from outrider.models.native.decoder import NativeDecoder
from outrider.models.weights import Weights


@final
class SwappingDecoder(LayeredTarget, GuessingTarget):
    """Two decoders of the same weights, one at a time."""

    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 16) -> None:
        self.config, self._bits = config, bits
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self._weights: Weights | None = weights
        self._now: Decoder | NativeDecoder = Decoder(config, weights, bits=bits)

    @property
    def is_native(self) -> bool:
        return isinstance(self._now, NativeDecoder)

    @property
    def has_own_threads(self) -> bool:
        return self._now.has_own_threads

    def new_cache(self, batch_size: int) -> Cache:
        library = BUILD.library
        if library is not None and self._weights is not None:
            self._now, self._weights = NativeDecoder(library, self.config, self._weights, self._bits), None
            self.gumbel_stream, self.choose = self._now.gumbel_stream, self._now.choose
        return self._now.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        return self._now.prefill(rows, cache, taps=taps)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        return self._now.score(tree, cache, taps=taps, start=start, resume=resume)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0) -> Tensor:
        return self._now.exit(tree, cache, route=route, start=start)

    def guess(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, plan: Plan, tempering: Tempering, noise: Noise
    ) -> Guesses | None:
        if not isinstance(self._now, NativeDecoder):
            return None
        return self._now.guess(rows, cache, plan=plan, tempering=tempering, noise=noise)

    def guess_tree(
        self,
        rows: Sequence[Sequence[int]],
        cache: Cache,
        *,
        search: TreeSearch,
        plan: Plan,
        tempering: Tempering,
        noise: Noise,
    ) -> tuple[TokenTree, Tensor] | None:
        if not isinstance(self._now, NativeDecoder):
            return None
        return self._now.guess_tree(rows, cache, search=search, plan=plan, tempering=tempering, noise=noise)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._now.logits(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] what enters the first layer."""
        return self._now.embed(tokens)
