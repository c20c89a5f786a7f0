"""The leader's view of a divided model: a target like any other, whose passes run on every rank.

Each call is first sent to the followers, then run here. Changes of caches are sent with the next pass, so a round is one
message, and one more for the choice. A draft model is whole on the leader, so drafting sends nothing.

The choice among the vocabulary needs no gathered logits if only a temperature shapes them (greedy included). Every rank finds
its best column, and the best of those is the choice. Everything else (top-k, top-p, penalties, grammars, log probabilities,
drafters that read scores) gathers the logits when it looks at them.

On GPUs with NCCL every rank runs the fast decoder. Passes, with their sums over ranks, are then captured graphs, and so are
whole rounds (``device/shared_round.py``). The leader manages all pages, and followers get the page numbers with each pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.draft import Resume
from outrider.core.interfaces import Cache, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.rng import Noise
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.watched_target import WatchedTarget
from outrider.models.lent_pages import lend
from outrider.models.parallel.rank import Opening, Rank
from outrider.models.parallel.team import RankTeam, watch

_PADDING = 32
"""A captured pass may be wider than its tree by less than this."""


@final
class ParallelTarget(LayeredTarget, WatchedTarget):
    """A model divided among processes of this machine, led by this one."""

    def __init__(self, opening: Opening) -> None:
        self._team = RankTeam(opening)
        try:
            self._rank = Rank(opening, 0)
        except BaseException:
            self._team.close()
            raise
        self._team.connect(self._rank)
        config, model = self._rank.config, self._rank.model
        self.config = config
        self.vocab_size, self.max_len, self.num_layers = config.vocab_size, config.max_len, config.num_layers
        self.device, self.dtype = model.device, model.dtype
        self.gumbel_stream, self.traits = model.gumbel_stream, model.traits
        if self._rank.is_led:
            self._lead()
        self._numbers = itertools.count()
        self._passes = itertools.count(1)
        self._pass = 0

    @property
    def num_weights(self) -> int:
        """Numbers in the leader's share."""
        return self._rank.num_weights

    @property
    def team(self) -> RankTeam:
        return self._team

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        watch(self._team, tell)

    @property
    def captured_as(self) -> Target:
        return self._rank.model

    def _lead(self) -> None:
        """Tell the followers about changes of pages, and about rounds that are captured and launched."""
        link, team, pool = self._rank.link, self._team, cast(Any, self._rank.model).pool
        pool.told = lambda verb, arguments: team.note("write", (verb, arguments))
        link.on_tell = lambda verb, arguments: (team.note if verb in ("forget", "lend") else team.tell)(verb, arguments)
        if self._team.followers:
            watch(self._team, lambda _: link.abort())

    def new_cache(self, batch_size: int) -> Cache:
        if self._rank.is_led:
            return self._rank.model.new_cache(batch_size)
        number = next(self._numbers)
        self.do("new_cache", number, batch_size)
        return MirroredCache(self, number)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        plain = [list(row) for row in rows]
        if not self._rank.is_led:
            return self.run("prefill", plain, self._number_of(cache, 0), tuple(taps))
        self._rank.caches[0] = cache  # the decoder tells the followers itself, since drafters ask it, too
        found = self._team.guarded(self._rank, "prefill", (plain, 0, tuple(taps)))
        self._rank.caches.clear()
        return found

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        number = self._number_of(cache, tree.num_nodes + _PADDING, start)
        tapped = self.run("score", _on_host(tree), number, tuple(taps), start, _resume_on_host(resume))
        self._pass = mine = next(self._passes)
        return Scores(partial(self._gathered, mine), tapped, choose=partial(self._chosen, mine))

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        number = self._number_of(cache, tree.num_nodes, start)
        return self.run("exit", _on_host(tree), number, route, start, _resume_on_host(begun))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.run("logits", hidden.cpu())

    def do(self, verb: str, *arguments: Any) -> None:
        """A call that needs no other rank. It is sent with the next pass."""
        self._team.note(verb, arguments)
        self._team.guarded(self._rank, verb, arguments)

    def run(self, verb: str, *arguments: Any) -> Any:
        """A call that every rank takes part in."""
        self._team.tell(verb, arguments)
        found = self._team.guarded(self._rank, verb, arguments)
        if self._rank.is_led:
            self._rank.caches.clear()  # a cache that was lent for this call
        return found

    def cache_of(self, number: int) -> Cache:
        return self._rank.caches[number]

    def derived(self, number: int, verb: str, *arguments: Any) -> MirroredCache:
        new = next(self._numbers)
        self.do("derive", number, verb, arguments, new)
        return MirroredCache(self, new)

    def _number_of(self, cache: Cache, num_nodes: int, start: int = 0) -> int:
        """The number by which every rank finds a cache that a pass of so many nodes reads and writes."""
        if isinstance(cache, MirroredCache):
            return cache.number
        assert isinstance(cache, PagedCache), "a divided model works on the caches it made"
        lend(self._rank.link, cache, num_nodes, start=start)
        self._rank.caches[0] = cache
        return 0

    def _gathered(self, which: int) -> Tensor:
        assert which == self._pass, "scores are read before the next pass"
        return self.run("gather")

    def _chosen(self, which: int, temperatures: Sequence[float], noise: Noise, depths: Tensor | None) -> Tensor:
        assert which == self._pass, "choices are made before the next pass"
        given = None if depths is None else (noise.seeds.cpu(), noise.positions.cpu(), depths.cpu().contiguous())
        return self.run("choose", list(temperatures), given)


@final
class MirroredCache(Cache):
    """A cache by its number. Every rank holds the keys and values of its own heads. Lengths are the same everywhere."""

    def __init__(self, target: ParallelTarget, number: int) -> None:
        self._target, self.number = target, number
        self.lengths = target.cache_of(number).lengths
        weakref.finalize(self, target.do, "drop", number).atexit = False

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self._change("reserve", num_nodes, start=start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._change("commit", [list(path) for path in paths])

    def truncate(self, lengths: Sequence[int]) -> None:
        self._change("truncate", list(lengths))

    def settle(self) -> None:
        self._change("settle")

    def fork(self, rows: Sequence[int]) -> MirroredCache:
        return self._target.derived(self.number, "fork", list(rows))

    def narrow(self, rows: Sequence[int]) -> MirroredCache:
        return self._target.derived(self.number, "narrow", list(rows))

    def join(self, other: Cache) -> MirroredCache:
        assert isinstance(other, MirroredCache), "a divided model works on the caches it made"
        return self._target.derived(self.number, "join", other.number)

    def _change(self, verb: str, *arguments: Any, **options: Any) -> None:
        self._target.do("change", self.number, verb, arguments, options)
        self.lengths = self._target.cache_of(self.number).lengths


def _on_host(tree: TokenTree) -> TokenTree:
    """Messages go through a pipe."""
    return TokenTree(tree.tokens.cpu().contiguous(), tree.parents.cpu().contiguous(), tree.sizes, tree.is_chain)


def _resume_on_host(resume: Resume | None) -> Resume | None:
    return None if resume is None else Resume(resume.layer, resume.hidden.cpu())
