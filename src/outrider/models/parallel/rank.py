"""One rank of a divided model: its share of the weights, its part of every cache, and what it does when it is told to.

Every rank runs the same calls in the same order; ``Rank`` is those calls. The leader calls its own after it told the others
(``target.py``); a follower calls what it was told (``follower.py``). Caches have numbers, since no rank sees another's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

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
from outrider.models.features import ModelConfig
from outrider.models.fuzzy import FuzzyDraft
from outrider.models.layer_share import LayerShare
from outrider.models.load import FEW_BITS, lean_checkpoint
from outrider.models.native import fastest_decoder
from outrider.models.parallel.link import Link
from outrider.models.quantised.rounded import rounded_decoder
from outrider.models.share import Share
from outrider.models.weights import read_weights


class Part(Division, Protocol):
    """What a rank holds of a model."""

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that cannot be divided so."""
        ...

    def config(self, config: ModelConfig) -> ModelConfig:
        """The part as a model of its own."""
        ...


@dataclass(frozen=True)
class Opening(ABC):
    """Which model is opened, and how: the same on every rank."""

    path: str
    size: int
    dtype: str | None
    device: str
    max_len: int | None
    fast: bool
    page_len: int

    def device_of(self, rank: int) -> torch.device:
        """A GPU for every rank, as far as there are any."""
        device = torch.device(self.device)
        return torch.device("cuda", rank % torch.cuda.device_count()) if device.type == "cuda" else device

    @abstractmethod
    def part(self, rank: int) -> Part: ...

    @abstractmethod
    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        """A rank's model of the whole model's ``config`` and its own ``weights``."""


@final
@dataclass(frozen=True)
class ByHeads(Opening):
    """Tensor parallelism: every rank has some heads and columns of every layer."""

    def part(self, rank: int) -> Share:
        return Share(rank, self.size)

    def model(self, config: ModelConfig, weights: Weights, link: Link) -> LayeredTarget:
        mine = link.share.config(config)
        if self.dtype in FEW_BITS:
            rounded = rounded_decoder(mine, weights, FEW_BITS[self.dtype], joint=link, page_len=self.page_len)
            if rounded is None:
                why = "a C++ compiler, OUTRIDER_NATIVE not 0, and an architecture of the native pass"
                raise OptionError(f"dtype = {self.dtype!r} of a divided model needs {why}; use 'bfloat16'")
            return rounded
        if self.fast:
            return fastest_decoder(mine, weights, joint=link, page_len=self.page_len)
        return Decoder(mine, weights, self.page_len, joint=link)


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
        found = lean_checkpoint(Path(opening.path), dtype=opening.dtype, device=device, max_len=opening.max_len)
        config, source, dtype = found
        part.check(config)
        self.config, self.device, self.dtype = config, device, dtype
        self.link = Link(Share(rank, opening.size), config.vocab_size)
        weights = read_weights(source, config, dtype=dtype, device=device, share=part)
        self.num_weights = sum(tensor.numel() for tensor in weights.tensors)
        self.model = opening.model(config, weights, self.link)
        self.caches: dict[int, Cache] = {}
        self._logits = torch.zeros(0)
        """Its columns of the latest scores."""

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
