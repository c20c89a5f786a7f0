"""Targets on devices that only run passes. Scores are copied to the host, where the rest of a round runs.

Apple's GPUs (PyTorch's device "mps") have no float64, which random numbers and acceptance rules need, and few people have tried
their operators. So only the model's layers and its cache are on the device. A round sees a target on the CPU. Both share the
memory, so returning scores costs one copy.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import Inner, WrappedTarget

_PASSES_ONLY = frozenset({"mps"})
_HOST = torch.device("cpu")


def host_side(model: Target) -> Target:
    """The model as rounds see it: itself, unless its device only runs passes."""
    if model.device.type not in _PASSES_ONLY:
        return model
    return LayersAway(model) if isinstance(model, LayeredTarget) else PassesAway(model)


def check_mps() -> None:
    """Refuse Apple's GPU if PyTorch does not support it here."""
    if not torch.backends.mps.is_available():
        why = "this machine has none" if torch.backends.mps.is_built() else "this PyTorch was built without it"
        raise OptionError(f"device 'mps' is not available ({why}); use cpu, which is the default on a Mac")


class Away(WrappedTarget[Inner], ABC):
    """A target on another device whose scores and taps are on the host."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.device = _HOST

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        found = self.inner.prefill(rows, cache, taps=taps)
        return {tap: [states.to(_HOST) for states in found[tap]] for tap in found}

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        scores = self.inner.score(tree.to(self.inner.device), cache, taps=taps, start=start, resume=self._sent(resume))
        return Scores(scores.logits.to(_HOST), {tap: scores.taps[tap].to(_HOST) for tap in scores.taps})

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden.to(self.inner.device)).to(_HOST)

    def _sent(self, begun: Resume | None) -> Resume | None:
        return None if begun is None else replace(begun, hidden=begun.hidden.to(self.inner.device))


@final
class PassesAway(Away[Target]):
    """The host's side of a target whose layers run together."""


@final
class LayersAway(Away[LayeredTarget], LayeredTarget):
    """The host's side of a target whose layers can be run apart."""

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        sent = tree.to(self.inner.device)
        return self.inner.exit(sent, cache, route=route, start=start, begun=self._sent(begun)).to(_HOST)
