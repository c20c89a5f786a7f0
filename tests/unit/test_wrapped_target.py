"""A wrapper around a target has every property of it that the wrapper does not state itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.resume import Resume
from outrider.core.rng import gumbel_stream
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget

OWN = {"can_be_captured": False, "why_together": ""}


class Unusual(Target):
    """Every property is another one than the default."""

    vocab_size, max_len, num_layers = 11, 22, 3
    device, dtype = torch.device("meta"), torch.float64
    is_invariant, says_all, can_be_captured, reads_whole = True, False, True, True
    why_together = " (it is unusual)"
    pads, has_own_threads, can_read_out = False, True, False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.gumbel_stream, self.choose = partial(gumbel_stream), partial(print)  # type: ignore[assignment]

    def new_cache(self, batch_size: int) -> Cache:
        raise NotImplementedError

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        raise NotImplementedError

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden + 1

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        tell("rank 1")


@final
class Bare(WrappedTarget):
    """A wrapper that changes nothing."""

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        return self.inner.prefill(rows, cache, taps=taps)

    def score(self, tree: TokenTree, cache: Cache, **given: Any) -> Scores:
        return self.inner.score(tree, cache, **given)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


def traits() -> set[str]:
    """What a target says of itself: annotated attributes and properties."""
    properties = {name for name, _ in inspect.getmembers(Target, lambda one: isinstance(one, property))}
    return set(inspect.get_annotations(Target)) | properties


def test_no_wrapper_forgets_a_property() -> None:
    inner = Unusual()
    wrapped = Bare(inner)
    assert {"vocab_size", "pads", "says_all"} <= traits()
    for name in traits() - set(OWN):
        assert getattr(wrapped, name) == getattr(inner, name), f"WrappedTarget does not hand on {name}"
    assert {name: getattr(wrapped, name) for name in OWN} == OWN


def test_the_loss_of_a_process_is_told_through_the_wrapper() -> None:
    heard: list[str] = []
    Bare(Unusual()).tell_loss(heard.append)
    assert heard == ["rank 1"]
