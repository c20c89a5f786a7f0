"""One rank of a divided model: its share of the weights, its part of every cache, and what it does when it is told to.

Every rank runs the same calls in the same order; ``Rank`` is those calls. The leader calls its own after it told the others
(``target.py``); a follower calls what it was told (``follower.py``). Caches have numbers, since no rank sees another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.interfaces import Cache
from outrider.core.rng import GOLDEN, Purpose, make_key
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.models.decoder import Decoder
from outrider.models.load import lean_checkpoint
from outrider.models.native import NativeDecoder, fastest_decoder
from outrider.models.parallel.link import Link
from outrider.models.share import Share
from outrider.models.weights import read_weights


@dataclass(frozen=True)
class Opening:
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


@final
class Rank:
    """A share at work."""

    def __init__(self, opening: Opening, rank: int) -> None:
        share, device = Share(rank, opening.size), opening.device_of(rank)
        found = lean_checkpoint(Path(opening.path), dtype=opening.dtype, device=device, max_len=opening.max_len)
        config, source, dtype = found
        share.check(config)
        self.config, self.device, self.dtype = config, device, dtype
        self.link = Link(share, config.vocab_size)
        weights = read_weights(source, config, dtype=dtype, device=device, share=share)
        self.num_weights = sum(tensor.numel() for tensor in weights.tensors)
        mine = share.config(config)
        self.model: Decoder | NativeDecoder
        if opening.fast and not opening.page_len:
            self.model = fastest_decoder(mine, weights, joint=self.link)
        else:
            self.model = Decoder(mine, weights, opening.page_len, joint=self.link)
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
        verbs = {"reserve": cache.reserve, "commit": cache.commit, "truncate": cache.truncate}
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

    def exit(self, tree: TokenTree, number: int, route: Route, start: int, resume: Resume | None) -> Tensor:
        here = None if resume is None else Resume(resume.layer, resume.hidden.to(self.device))
        return self.model.exit(tree.to(self.device), self.caches[number], route=route, start=start, resume=here)

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
