"""One rank of a divided model: its share of the weights, its part of every cache, and what it does when it is told to.

Every rank runs the same calls in the same order. ``Rank`` has these calls. The leader first tells the others, then makes its
own call (``target.py``); a follower makes the calls it is told (``follower.py``). Caches have numbers, because no rank sees
another's caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.core.draft import Resume
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache
from outrider.core.layered_target import LayeredTarget
from outrider.core.rng import GOLDEN, Purpose, make_key
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.decoder import Decoder
from outrider.models.decoder_weights import Division, Weights
from outrider.models.dtypes import EIGHT_BITS, FEW_BITS, STORED
from outrider.models.features import ModelConfig
from outrider.models.fuzzy import FuzzyDraft
from outrider.models.gpu import gpu_decoder
from outrider.models.layer_share import LayerShare
from outrider.models.load import lean_checkpoint, lean_config
from outrider.models.native import fastest_decoder, native_decoder
from outrider.models.native.known import multiplies_stored
from outrider.models.parallel.link import Link, backend_of
from outrider.models.parallel.stored import InEight, rounded_share, stored_share
from outrider.models.quantised.weight_rounding import rounded_decoder
from outrider.models.share import Share
from outrider.models.weights import read_weights


class RankShare(Division, Protocol):
    """A rank's share of a model."""

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that cannot be divided so."""
        ...

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config of this share, as if it were a whole model."""
        ...


@dataclass(frozen=True)
class Opening(ABC):
    """The model to open, and its options, the same on every rank."""

    path: str
    size: int
    dtype: str | None
    device: str
    max_len: int | None
    fast: bool
    page_len: int
    numerics: str = "auto"
    unit: int = 1
    """Columns of an MLP that stay together (``units.py``)."""

    def device_of(self, rank: int) -> torch.device:
        """A GPU for every rank, as far as there are any."""
        device = torch.device(self.device)
        return torch.device("cuda", rank % torch.cuda.device_count()) if device.type == "cuda" else device

    @property
    def is_wired(self) -> bool:
        """Whether sums over ranks can be part of a captured graph."""
        return backend_of(torch.device(self.device), self.size) == "nccl"

    @abstractmethod
    def part(self, rank: int) -> RankShare: ...

    def weights(self, part: RankShare, device: torch.device) -> tuple[ModelConfig, Weights]:
        """The whole model's config, and what a rank holds."""
        found = lean_checkpoint(Path(self.path), dtype=self.dtype, device=device, max_len=self.max_len)
        config, source, dtype = found
        part.check(config)
        return config, read_weights(source, config, dtype=dtype, device=device, share=part)

    @abstractmethod
    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        """A rank's model of the whole model's ``config`` and its own ``weights``."""


@final
@dataclass(frozen=True)
class ByHeads(Opening):
    """Tensor parallelism: every rank has some heads and columns of every layer."""

    def part(self, rank: int) -> Share:
        return Share(rank, self.size, self.unit)

    def weights(self, part: RankShare, device: torch.device) -> tuple[ModelConfig, Weights]:
        assert isinstance(part, Share)
        path, is_gpu = Path(self.path), device.type == "cuda"
        if self.dtype != STORED and not (self.dtype in FEW_BITS and is_gpu) and self.dtype != EIGHT_BITS:
            return super().weights(part, device)
        config = lean_config(path)
        config = config if self.max_len is None else replace(config, max_len=self.max_len)
        part.check(config)
        if self.dtype == STORED:
            return config, stored_share(path, config, part, device)
        _, source, dtype = lean_checkpoint(path, dtype=self.dtype, device=device, max_len=self.max_len)
        if not is_gpu:
            return config, read_weights(source, config, dtype=dtype, device=device, share=InEight(part))
        return config, rounded_share(source, config, part, FEW_BITS[self.dtype], device)

    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        mine, bits = self.part(link.rank).config(config), FEW_BITS.get(self.dtype or "", 16)
        if self.fast:
            whole, options = replace(mine, vocab_size=config.vocab_size), {"numerics": self.numerics, "bits": bits}
            found = gpu_decoder(whole, weights, **options, page_len=self.page_len, joint=link)
            if found is not None:
                return found
        if self.dtype in FEW_BITS or self.dtype == STORED:
            is_packed = weights.rows is not None
            found = None if is_packed else self._of_codes(mine, weights, link)
            if found is None:
                why = "a C++ compiler, OUTRIDER_NATIVE not 0, and an architecture of the native pass"
                why = "a share that the GPU's fast decoder can run" if is_packed else why
                raise OptionError(f"dtype = {self.dtype!r} of a divided model needs {why}; use 'bfloat16'")
            return found
        if self.fast:
            return fastest_decoder(mine, weights, joint=link, page_len=self.page_len)
        return Decoder(mine, weights, self.page_len, joint=link)

    def _of_codes(self, mine: ModelConfig, weights: Weights, link: Link) -> LayeredTarget | None:
        if self.dtype == EIGHT_BITS:
            known = multiplies_stored(mine)
            return native_decoder(mine, weights, FEW_BITS[EIGHT_BITS], joint=link, page_len=self.page_len) if known else None
        if self.dtype in FEW_BITS:
            return rounded_decoder(mine, weights, FEW_BITS[self.dtype], joint=link, page_len=self.page_len)
        return native_decoder(mine, weights, joint=link, page_len=self.page_len)


@final
@dataclass(frozen=True)
class ByLayers(Opening):
    """EasySpec: every rank has some whole layers, which run at once."""

    def part(self, rank: int) -> LayerShare:
        return LayerShare(Share(rank, self.size))

    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        part = LayerShare(link.share)
        held = {number: place for place, number in enumerate(part.layers(config.num_layers))}
        decoder = Decoder(part.config(config), weights, self.page_len)
        return FuzzyDraft(decoder, link, num_layers=config.num_layers, size=self.size, held=held)


@final
class Rank:
    """A share at work."""

    def __init__(self, opening: Opening, rank: int) -> None:
        part, device = opening.part(rank), opening.device_of(rank)
        config, weights = opening.weights(part, device)
        self.config, self.device, self.dtype = config, device, weights.dtype
        self.link = Link(Share(rank, opening.size), config.vocab_size, is_wired=opening.is_wired)
        self.num_weights = sum(tensor.numel() for tensor in weights.tensors)
        self.model = opening.model(config, weights, self.link)
        self.caches: dict[int, Cache] = {}
        self._logits = torch.zeros(0)
        """This rank's columns of the latest scores."""
        self._lent: list[list[int]] = []
        self._rounds: dict[int, Any] = {}
        self._graphs: Any = None
        """Memory that the captured rounds share."""

    @property
    def is_led(self) -> bool:
        """Whether the first rank manages its pages, and captured rounds tell it what to read."""
        return self.model.traits.can_be_captured

    def lend(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """A follower that is led gets the pages of the cache that the next pass reads and writes, under the number 0."""
        cache = self.caches[0] = PagedCache.empty(self._pool, len(lengths))
        self._lent = cache.pages
        for row, mine in zip(cache.pages, pages, strict=True):
            row.extend(mine)
        cache.lengths = list(lengths)

    def give_back(self) -> None:
        """Forget lent pages. The first rank counts their users, so they are not released here."""
        for row in self._lent:
            row.clear()

    def write(self, verb: str, arguments: Sequence[Any]) -> None:
        """Repeat on a led follower's pages an operation that the first rank did on its own, outside passes."""
        vars(PagePool)[verb](self._pool, *arguments)

    def capture(self, key: int, spec: Any) -> None:
        """A led follower captures its part of a round, under a name. The message says how."""
        if not self._rounds:  # a pool goes with the last graph that used it
            self._graphs = torch.cuda.graph_pool_handle()
        made = self._rounds[key] = spec.followed(self.model)
        made.capture(self._graphs)

    def launch(self, key: int) -> None:
        self._rounds[key].launch()

    def forget(self, key: int) -> None:
        del self._rounds[key]

    @property
    def _pool(self) -> PagePool:
        return cast(Any, self.model).pool

    def new_cache(self, number: int, batch_size: int) -> None:
        self.caches[number] = self.model.new_cache(batch_size)

    def drop(self, number: int) -> None:
        del self.caches[number]

    def change(self, number: int, verb: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """A change of a cache in place."""
        cache = self.caches[number]
        verbs = {"reserve": cache.reserve, "commit": cache.commit, "truncate": cache.truncate, "settle": cache.settle}
        verbs[verb](*arguments, **options)

    def derive(self, number: int, verb: str, arguments: Sequence[Any], new: int) -> None:
        """A new cache out of one, or of two."""
        cache = self.caches[number]
        verbs = {"fork": cache.fork, "narrow": cache.narrow, "join": lambda other: cache.join(self.caches[other])}
        self.caches[new] = verbs[verb](*arguments)

    def prefill(self, rows: Sequence[Sequence[int]], number: int, taps: Sequence[int]) -> Mapping[int, list[Tensor]]:
        return self.model.prefill(rows, self.caches[number], taps=taps)

    def score(
        self, tree: TokenTree, number: int, taps: Sequence[int], start: int, resume: Resume | None
    ) -> Mapping[int, Tensor]:
        """Scores stay here until they are asked for, by ``choose`` or ``gather``; returns the taps, which are whole."""
        here = None if resume is None else Resume(resume.layer, resume.hidden.to(self.device))
        scores: Scores = self.model.score(tree.to(self.device), self.caches[number], taps=taps, start=start, resume=here)
        self._logits = scores.logits.float()
        return scores.taps

    def exit(self, tree: TokenTree, number: int, route: Route, start: int, begun: Resume | None) -> Tensor:
        here = None if begun is None else Resume(begun.layer, begun.hidden.to(self.device))
        return self.model.exit(tree.to(self.device), self.caches[number], route=route, start=start, begun=here)

    def gather(self) -> Tensor:
        """[B, N, V] the latest scores, whole."""
        return self.link.gather_vocabulary(self._logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of states that every rank was given."""
        return self.link.gather_vocabulary(self.model.logits(hidden.to(self.device)).float())

    def choose(self, temperatures: Sequence[float], noise: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """[B, N] the target's choices from the latest scores: two numbers a node are gathered, not its logits.

        ``noise`` is seeds [B], positions [B] and depths [B, N]; None where every temperature is 0. A rank makes the noise of
        its own columns: the numbers are those of the whole vocabulary."""
        logits, first = self._logits, self.link.first_token
        if noise is not None:
            seeds, positions, depths = (tensor.to(self.device) for tensor in noise)
            keys = make_key(seeds[:, None], positions[:, None] + depths, Purpose.TARGET) + torch.tensor(first) * GOLDEN
            warmth = torch.tensor(temperatures, device=self.device)[:, None, None]
            warm = logits / torch.where(warmth == 0, 1.0, warmth) + self.model.gumbel_stream(keys, logits.shape[-1])
            logits = torch.where(warmth == 0, logits, warm)
        values, places = logits.max(-1)
        return self.link.best(values, places + first)
