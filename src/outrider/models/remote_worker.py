"""The other process of ``remote.py``: open a model, then do what the messages say and answer the last call of each.

python -m outrider.models.remote_worker        started by ``RemoteModel``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.core.guessing_target import GuessingTarget, TreeSearch, guess_by_steps
from outrider.core.interfaces import Cache, Plan, Target
from outrider.core.rng import Noise
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.companion import answering, read_message, write_message
from outrider.models.load import load_model

Law = tuple[Tempering, Tensor, Tensor]
"""Sampling of guesses: temperatures and truncations, seeds, output positions."""


@final
class RemoteWorker:
    """A model and its caches, by number."""

    def __init__(self, model: Target) -> None:
        self._model = model
        self._caches: dict[int, Cache] = {}

    def facts(self) -> dict[str, Any]:
        model = self._model
        return {name: vars(model).get(name) for name in ("vocab_size", "max_len", "num_layers", "dtype")} | {
            "traits": model.traits
        }

    def new_cache(self, number: int, batch_size: int) -> None:
        self._caches[number] = self._model.new_cache(batch_size)

    def drop(self, number: int) -> None:
        del self._caches[number]

    def reserve(self, number: int, num_nodes: int, start: int) -> None:
        self._caches[number].reserve(num_nodes, start=start)

    def commit(self, number: int, paths: Sequence[Sequence[int]]) -> None:
        self._caches[number].commit(paths)

    def truncate(self, number: int, lengths: Sequence[int]) -> None:
        self._caches[number].truncate(lengths)

    def fork(self, new: int, number: int, rows: Sequence[int]) -> None:
        self._caches[new] = self._caches[number].fork(rows)

    def narrow(self, new: int, number: int, rows: Sequence[int]) -> None:
        self._caches[new] = self._caches[number].narrow(rows)

    def join(self, new: int, number: int, other: int) -> None:
        self._caches[new] = self._caches[number].join(self._caches[other])

    def prefill(self, number: int, rows: Sequence[Sequence[int]], taps: Sequence[int]) -> dict[int, list[Tensor]]:
        found = self._model.prefill(rows, self._caches[number], taps=taps)
        return {tap: [states.cpu() for states in many] for tap, many in found.items()}

    def score(self, number: int, tree: TokenTree, taps: Sequence[int], start: int) -> tuple[Tensor, dict[int, Tensor]]:
        scores = self._model.score(tree.to(self._model.device), self._caches[number], taps=taps, start=start)
        return scores.logits.cpu(), {tap: scores.taps[tap].cpu() for tap in scores.taps}

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden.to(self._model.device)).cpu()

    def guess(self, number: int, rows: Sequence[Sequence[int]], plan: Plan, law: Law) -> tuple[Any, list[int]]:
        model, cache, tempering, noise = self._model, self._caches[number], law[0], self._noise(law)
        found = None
        if isinstance(model, GuessingTarget):
            found = model.guess(rows, cache, plan=plan, tempering=tempering, noise=noise)
        if found is None and tempering.is_plain and plan.doubt is None:
            told = {"temperatures": tempering.temperatures, "noise": noise, "vocab_size": model.vocab_size}
            found = guess_by_steps(model, rows, cache, depths=plan.max_depth, **told)
        return found, list(cache.lengths)

    def guess_tree(
        self, number: int, rows: Sequence[Sequence[int]], plan: Plan, law: Law, search: TreeSearch
    ) -> tuple[Any, list[int]]:
        found, cache = None, self._caches[number]
        if isinstance(self._model, GuessingTarget):
            noise = self._noise(law)
            found = self._model.guess_tree(rows, cache, search=search, plan=plan, tempering=law[0], noise=noise)
        return found, list(cache.lengths)

    def _noise(self, law: Law) -> Noise:
        device = self._model.device
        return Noise(law[1].to(device), law[2].to(device), self._model.gumbel_stream, self._model.choose)


def main() -> None:
    answers = answering()
    name, options = read_message(sys.stdin.buffer)
    try:
        worker = RemoteWorker(load_model(name, **options))
    except OutriderError as error:  # the user's to mend, so it is told and not died of
        write_message(answers, ("refused", str(error)))
        return
    write_message(answers, ("done", worker.facts()))
    with torch.inference_mode():
        while (message := read_message(sys.stdin.buffer)) is not None:
            found = None
            for verb, arguments in message:
                found = vars(RemoteWorker)[verb](worker, *arguments)
            write_message(answers, ("done", found))


if __name__ == "__main__":
    main()
