"""A target around another one: what it does not change is the inner target's, so that no wrapper forgets a property."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable

from outrider.core.interfaces import Target


class WrappedTarget(Target, ABC):
    """A target that changes part of what another one does, and is like it in everything else.

    Two properties are never the inner target's. ``can_be_captured`` stays False, because a captured round would pass the
    wrapper by. ``why_together`` is the wrapper's own reason."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.vocab_size, self.max_len, self.num_layers = inner.vocab_size, inner.max_len, inner.num_layers
        self.device, self.dtype = inner.device, inner.dtype
        self.gumbel_stream, self.choose, self.is_invariant = inner.gumbel_stream, inner.choose, inner.is_invariant
        self.says_all, self.reads_whole = inner.says_all, inner.reads_whole

    @property
    def pads(self) -> bool:
        return self.inner.pads

    @property
    def has_own_threads(self) -> bool:
        return self.inner.has_own_threads

    @property
    def can_read_out(self) -> bool:
        return self.inner.can_read_out

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        self.inner.tell_loss(tell)
