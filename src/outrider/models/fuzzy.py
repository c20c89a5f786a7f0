"""A draft model that guesses with fuzzy passes and reads what was accepted exactly (EasySpec, arXiv 2502.02493).

Groups of its layers run at the same time, all on the input of the group (``layer_groups.py``). Keys and values of such a pass
are close to the model's own, and errors would add up over a text. So a round begins with an exact pass over the tokens that
were committed since the last exact one (*bonus calibration*). Its last logits are the first guess, so it costs no pass of its
own. Later passes of the round are fuzzy. Guesses get a little worse; lossless rules stay lossless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.interfaces import Cache
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.decoder import Decoder
from outrider.models.layer_groups import Group, Relayed
from outrider.models.layers import AnyLayer
from outrider.models.rank_sums import Joint


def holder_of(layer: int, size: int) -> int:
    """The rank that holds a layer. Neighbouring layers, which form a group, are on different ranks."""
    return layer % size


@final
class FuzzyDraft(LayeredTarget):
    """A decoder that can run ``size`` layers at once. ``decoder`` has the layers of one rank, or all of them."""

    def __init__(self, decoder: Decoder, joint: Joint, *, num_layers: int, size: int, held: Mapping[int, int]) -> None:
        """``held`` maps each of the model's ``num_layers`` layers that ``decoder`` has to its index there."""

        def of(layers: Sequence[AnyLayer], numbers: Sequence[int]) -> list[AnyLayer | None]:
            return [layers[held[number]] if number in held else None for number in numbers]

        def in_turn(layers: Sequence[AnyLayer]) -> list[AnyLayer]:
            mine = of(layers, range(num_layers))
            return [Relayed(holder_of(number, size), layer, joint) for number, layer in enumerate(mine)]

        def at_once(layers: Sequence[AnyLayer]) -> list[AnyLayer]:
            groups = [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
            return [Group([layer for layer in of(layers, group) if layer is not None], joint) for group in groups]

        self._exact, self._fuzzy = decoder.relaid(in_turn, joint), decoder.relaid(at_once, joint)
        self.vocab_size, self.max_len, self.num_layers = decoder.vocab_size, decoder.max_len, num_layers
        self.device, self.dtype = decoder.device, decoder.dtype

    def new_cache(self, batch_size: int) -> FuzzyCache:
        return FuzzyCache(self._exact.new_cache(batch_size))

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        held = _held(cache)
        found = self._exact.prefill(rows, held.inner, taps=taps)
        held.grew(is_exact=True)
        return found

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        """Exact at the start of a round and for callers that tap layers; fuzzy otherwise."""
        held = _held(cache)
        held.is_exact = held.is_settled or bool(taps) or resume is not None
        held.is_settled = False
        model = self._exact if held.is_exact else self._fuzzy
        return model.score(tree, held.inner, taps=taps, start=start, resume=resume)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        return self._exact.exit(tree, _held(cache).inner, route=route, start=start, begun=begun)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._exact.logits(hidden)


@final
class FuzzyCache(Cache):
    """A cache that records how much of each row was written by exact passes."""

    def __init__(self, inner: Any, num_exact: Sequence[int] | None = None) -> None:
        self.inner: Any = inner
        self.lengths = list(inner.lengths)
        self.num_exact = list(self.lengths if num_exact is None else num_exact)
        self.is_settled = True
        """Whether the next pass reads committed tokens, so that it is exact."""
        self.is_exact = True
        """Whether the last pass was exact."""

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.inner.reserve(num_nodes, start=start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.inner.commit(paths)
        self.grew(is_exact=self.is_exact)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.inner.truncate(lengths)
        self.lengths = list(self.inner.lengths)
        self.num_exact = [min(pair) for pair in zip(self.num_exact, self.lengths, strict=True)]

    def settle(self) -> None:
        self.truncate(self.num_exact)
        self.is_settled = True

    def fork(self, rows: Sequence[int]) -> FuzzyCache:
        return FuzzyCache(self.inner.fork(rows), [self.num_exact[row] for row in rows])

    def narrow(self, rows: Sequence[int]) -> FuzzyCache:
        return FuzzyCache(self.inner.narrow(rows), [self.num_exact[row] for row in rows])

    def join(self, other: Cache) -> FuzzyCache:
        theirs = _held(other)
        return FuzzyCache(self.inner.join(theirs.inner), [*self.num_exact, *theirs.num_exact])

    def grew(self, *, is_exact: bool) -> None:
        """Record committed tokens. Those of an exact pass are exact if all tokens before them are."""
        before, self.lengths = self.lengths, list(self.inner.lengths)
        if is_exact:
            rows = zip(self.num_exact, before, self.lengths, strict=True)
            self.num_exact = [now if exact == then else exact for exact, then, now in rows]


def _held(cache: Cache) -> FuzzyCache:
    assert isinstance(cache, FuzzyCache), "a model works on the caches it made"
    return cache
