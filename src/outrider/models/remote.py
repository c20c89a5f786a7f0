"""A model in another process, with the interface of a local one: a draft that runs on its own cores.

Passes of one process take turns on a CPU. A draft in its own process can draft while the target verifies, which ``pearl``
needs; any other method may use it too. Calls become messages. Changes of caches are sent with the next call that has an answer,
so a chain of guesses is one message and one answer. Numbers and texts are those of a local model.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.errors import OptionError, RankError
from outrider.core.guessing_target import Guesses, GuessingTarget, TreeSearch
from outrider.core.interfaces import Cache, Plan
from outrider.core.rng import Noise
from outrider.core.scores import Scores
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.companion import Companion

_WORKER = "outrider.models.remote_worker"


@final
class RemoteModel(GuessingTarget):
    """The model called ``name``, opened by another process. One thread at a time."""

    def __init__(self, name: str, *, dtype: str | None = None, device: str | None = None, fast: bool = True) -> None:
        place, threads = device or "its own device", torch.get_num_threads()
        first = (name, {"dtype": dtype, "device": device, "fast": fast})
        self._process = Companion(f"the process of model {name!r}", _WORKER, first, place=place, num_threads=threads)
        weakref.finalize(self, self._process.end)
        self._notes: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._numbers = itertools.count()
        facts = self._answer()
        self.vocab_size, self.max_len, self.num_layers = facts["vocab_size"], facts["max_len"], facts["num_layers"]
        self.device, self.dtype = torch.device("cpu"), facts["dtype"]
        self.traits = replace(facts["traits"], can_be_captured=False, has_own_threads=False)  # its threads are elsewhere

    @property
    def process_id(self) -> int:
        return self._process.process.pid

    def new_cache(self, batch_size: int) -> RemoteCache:
        return self.derived([0] * batch_size, "new_cache", batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        held = _held(cache)
        found = self._ask("prefill", held.number, [list(row) for row in rows], tuple(taps))
        held.lengths = [length + len(row) for length, row in zip(held.lengths, rows, strict=True)]
        return found

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert resume is None, "a model elsewhere does not draft for itself"
        logits, tapped = self._ask("score", _held(cache).number, _plain(tree), tuple(taps), start)
        return Scores(logits, tapped)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ask("logits", hidden.cpu())

    def guess(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, plan: Plan, tempering: Tempering, noise: Noise
    ) -> Guesses | None:
        law = (tempering, noise.seeds.cpu(), noise.positions.cpu())
        return self._guessed("guess", cache, ([list(row) for row in rows], _sizes(plan), law))

    def guess_tree(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, search: TreeSearch, plan: Plan, tempering: Tempering, noise: Noise
    ) -> tuple[TokenTree, Tensor] | None:
        law = (tempering, noise.seeds.cpu(), noise.positions.cpu())
        return self._guessed("guess_tree", cache, ([list(row) for row in rows], _sizes(plan), law, search))

    def note(self, verb: str, *arguments: Any) -> None:
        """Queue a message, sent with the next call that has an answer."""
        self._notes.append((verb, arguments))

    def derived(self, lengths: list[int], verb: str, *arguments: Any) -> RemoteCache:
        number = next(self._numbers)
        self.note(verb, number, *arguments)
        return RemoteCache(self, number, lengths)

    def _guessed(self, verb: str, cache: Cache, arguments: tuple[Any, ...]) -> Any:
        held = _held(cache)
        found, held.lengths = self._ask(verb, held.number, *arguments)
        return found

    def _ask(self, verb: str, *arguments: Any) -> Any:
        message = [self._notes.popleft() for _ in range(len(self._notes))] + [(verb, arguments)]
        try:
            self._process.tell(message)
        except OSError as error:
            self._lost(error)
        return self._answer()

    def _answer(self) -> Any:
        found = self._process.answer()
        if found is None:
            self._lost(None)
        kind, value = found
        if kind == "refused":
            raise OptionError(value)
        return value

    def _lost(self, cause: BaseException | None) -> NoReturn:
        self._process.process.wait()
        raise RankError(f"{self._process.describe_end()}; load the model again") from cause


@final
class RemoteCache(Cache):
    """A cache in the other process, by number. Its lengths are known here."""

    def __init__(self, model: RemoteModel, number: int, lengths: list[int]) -> None:
        self._model, self.number, self.lengths = model, number, list(lengths)
        weakref.finalize(self, partial(model.note, "drop", number)).atexit = False

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self._model.note("reserve", self.number, num_nodes, start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._model.note("commit", self.number, [list(path) for path in paths])
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        self._model.note("truncate", self.number, list(lengths))
        self.lengths = list(lengths)

    def fork(self, rows: Sequence[int]) -> RemoteCache:
        return self._model.derived([self.lengths[row] for row in rows], "fork", self.number, list(rows))

    def narrow(self, rows: Sequence[int]) -> RemoteCache:
        return self._model.derived([self.lengths[row] for row in rows], "narrow", self.number, list(rows))

    def join(self, other: Cache) -> RemoteCache:
        theirs = _held(other)
        return self._model.derived([*self.lengths, *theirs.lengths], "join", self.number, theirs.number)


def _held(cache: Cache) -> RemoteCache:
    assert isinstance(cache, RemoteCache), "a model works on the caches it made"
    return cache


def _plain(tree: TokenTree) -> TokenTree:
    """The tree without its cached properties, to keep messages short."""
    return TokenTree(tree.tokens.cpu().contiguous(), tree.parents.cpu().contiguous(), tree.sizes, tree.is_chain)


def _sizes(plan: Plan) -> Plan:
    """A plan without the parts that cannot be sent."""
    return Plan(plan.max_depth, plan.max_nodes, None, plan.doubt)
