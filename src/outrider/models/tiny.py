"""Toy models as targets, shipped for tests, proofs and examples: exact laws, counted laws, and a small random decoder.

``TableModel`` has a given law. Its logits are float64 logarithms of given probabilities, so the output law of a whole decoding
loop can be computed and compared to 1e-12. The class ``NgramModel`` counts a text. Both remember tokens instead of keys and
values. ``tiny_decoder`` is the real decoder with random weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Target
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.random_decoder import tiny_config, tiny_decoder

__all__ = ["ContextModel", "NgramModel", "TableModel", "TokenCache", "tiny_config", "tiny_decoder"]


@final
class TokenCache(Cache):
    """A cache of tokens."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = [list(row) for row in rows]
        self.nodes: list[list[int]] = [[] for _ in rows]
        """Tokens of the tree being scored."""

    @property
    def lengths(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride] - follows from the rows
        return [len(row) for row in self.rows]

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        del num_nodes, start

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, nodes, path in zip(self.rows, self.nodes, paths, strict=True):
            row += [nodes[node] for node in path]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    def fork(self, rows: Sequence[int]) -> TokenCache:
        return TokenCache([self.rows[row] for row in rows])

    def join(self, other: Cache) -> TokenCache:
        assert isinstance(other, TokenCache), "only caches of one kind can be joined"
        return TokenCache([*self.rows, *other.rows])


class ContextModel(Target):
    """A model that is a function of the tokens before. It has no layers; its only tap, 0, is the token as a one-hot vector."""

    def __init__(self, vocab_size: int, max_len: int) -> None:
        self.vocab_size, self.max_len, self.num_layers = vocab_size, max_len, 0
        self.device, self.dtype = torch.device("cpu"), torch.float64

    @abstractmethod
    def law(self, context: Sequence[int]) -> Tensor:
        """[V] float64 probabilities of the token after ``context``."""

    def new_cache(self, batch_size: int) -> TokenCache:
        return TokenCache([[] for _ in range(batch_size)])

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        assert isinstance(cache, TokenCache), "a toy model works on the caches it made"
        for known, row in zip(cache.rows, rows, strict=True):
            known += list(row)
        return {tap: [self._one_hot(torch.tensor(list(row), dtype=torch.int64)) for row in rows] for tap in taps}

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert resume is None, "only a LayeredTarget can go on from earlier layers"
        assert isinstance(cache, TokenCache), "a toy model works on the caches it made"
        cache.nodes = tree.tokens.tolist()
        logits = torch.stack([self._row_logits(tree, cache, row, start) for row in range(tree.batch_size)])
        return Scores(logits, {tap: self._one_hot(tree.tokens[:, start:]) for tap in taps})

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits from one-hot tokens alone, as if the token were the whole context."""
        tokens = hidden.argmax(-1)
        laws = [self.law([token]).log() for token in tokens.flatten().tolist()]
        return torch.stack(laws).view(*tokens.shape, self.vocab_size)

    def _row_logits(self, tree: TokenTree, cache: TokenCache, row: int, start: int) -> Tensor:
        nodes, before = cache.nodes[row], cache.rows[row]
        paths = ([nodes[0], *[nodes[n] for n in tree.path(row, node)]] for node in range(start, tree.num_nodes))
        return torch.stack([self.law([*before, *path]).log() for path in paths])

    def _one_hot(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab_size).to(self.dtype)


@final
class TableModel(ContextModel):
    """A model with a given law: a table over the last k tokens, or any function of the whole context."""

    def __init__(self, law: Tensor | Callable[[Sequence[int]], Tensor | Sequence[float]], *, max_len: int = 1 << 20) -> None:
        """A table has k + 1 dimensions of size V, the next token last. Positions before the first token count as token 0.
        A function gets all tokens before and returns V probabilities."""
        self._law = law
        self._num_seen = law.dim() - 1 if isinstance(law, Tensor) else 0
        super().__init__(law.shape[-1] if isinstance(law, Tensor) else len(law([0])), max_len)

    def law(self, context: Sequence[int]) -> Tensor:
        if not isinstance(self._law, Tensor):
            return torch.as_tensor(self._law(context), dtype=torch.float64)
        last = [*[0] * self._num_seen, *context]
        return self._law[tuple(last[len(last) - self._num_seen :])].double()

    @staticmethod
    def random(vocab_size: int, *, num_seen: int = 1, seed: int = 0, sharpness: float = 1.0) -> TableModel:
        """A random table; larger ``sharpness`` makes its laws less uniform."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn([vocab_size] * (num_seen + 1), generator=generator, dtype=torch.float64)
        return TableModel(torch.softmax(logits * sharpness, -1))


@final
class NgramModel(ContextModel):
    """Counts of a text, each order smoothed with the one below it:

    p_k(x | c) = (count(c x) + a p_{k-1}(x | c')) / (count(c) + a),   p_{-1} uniform,   c' = c without its first token.
    """

    def __init__(self, tokens: Sequence[int], *, order: int, vocab_size: int, smoothing: float = 0.5) -> None:
        if order < 1 or not smoothing > 0:
            raise OptionError(f"order = {order}, smoothing = {smoothing} is not valid; use an order >= 1 and a smoothing > 0")
        super().__init__(vocab_size, 1 << 20)
        self._order, self._smoothing = order, smoothing
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for end, token in enumerate(tokens):
            for num_seen in range(min(order, end + 1)):
                self._counts[tuple(tokens[end - num_seen : end])][token] += 1
        self._laws: dict[tuple[int, ...], Tensor] = {}

    def law(self, context: Sequence[int]) -> Tensor:
        return self._smoothed(tuple(context[max(0, len(context) - self._order + 1) :]))

    def _smoothed(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._laws:
            if context:
                below = self._smoothed(context[1:])
            else:
                below = torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=torch.float64)
            self._laws[context] = self._one_order(context, below)
        return self._laws[context]

    def _one_order(self, context: tuple[int, ...], below: Tensor) -> Tensor:
        counts = self._counts.get(context, {})
        law = below * self._smoothing
        for token, count in counts.items():
            law[token] += count
        return law / law.sum()
