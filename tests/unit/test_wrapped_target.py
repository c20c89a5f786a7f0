"""A wrapper around a target has every property of it that the wrapper does not state itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, final
from unittest.mock import create_autospec

import torch
from torch import Tensor

from outrider.core.device_round import PairedRows
from outrider.core.interfaces import Cache, Target
from outrider.core.resume import Resume
from outrider.core.rng import gumbel_stream
from outrider.core.scores import Scores
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget

OWN: dict[str, Any] = {"can_be_captured": False, "why_together": ""}
OTHER = TargetTraits(
    is_invariant=True,
    says_all=False,
    can_be_captured=True,
    captured_pairs=create_autospec(PairedRows, instance=True),
    reads_whole=True,
    pads=False,
    has_own_threads=True,
    can_read_out=False,
    why_together=" (it is unusual)",
    kv_cache="int8",
)
"""Every trait is another one than the default."""


class Unusual(Target):
    """Every property is another one than the default."""

    vocab_size, max_len, num_layers = 11, 22, 3
    device, dtype = torch.device("meta"), torch.float64
    traits = OTHER

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


@final
class Bare(WrappedTarget[Target]):
    """A wrapper that changes nothing."""

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        return self.inner.prefill(rows, cache, taps=taps)

    def score(self, tree: TokenTree, cache: Cache, **given: Any) -> Scores:
        return self.inner.score(tree, cache, **given)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


def properties() -> set[str]:
    """What a target says of itself: annotated attributes and properties."""
    found = {name for name, _ in inspect.getmembers(Target, lambda one: isinstance(one, property))}
    return set(inspect.get_annotations(Target)) | found


def test_no_wrapper_forgets_a_property() -> None:
    inner = Unusual()
    wrapped = Bare(inner)
    assert {"vocab_size", "traits", "choose"} <= properties()
    for name in properties() - {"traits", "captured_as"}:  # a wrapper is not captured
        assert getattr(wrapped, name) == getattr(inner, name), f"WrappedTarget does not hand on {name}"


def test_a_wrapper_has_the_traits_of_what_it_wraps() -> None:
    """But for two, which are its own. A wrapper that changes another one says so by ``replace``."""
    default = TargetTraits()
    assert all(getattr(OTHER, each.name) != getattr(default, each.name) for each in fields(TargetTraits))
    assert Bare(Unusual()).traits == replace(OTHER, **OWN)
