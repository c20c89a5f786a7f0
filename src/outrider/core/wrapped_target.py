"""A target around another one. Whatever it does not change is the inner target's, so no wrapper forgets a property."""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Generic, TypeVar

from outrider.core.interfaces import Target

Inner = TypeVar("Inner", bound=Target)


class WrappedTarget(Target, ABC, Generic[Inner]):
    """A target that changes part of another one and inherits the rest.

    Two traits are never inherited. A captured round would bypass the wrapper, and only the wrapper can say why its
    layers cannot be run apart.
    """

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.vocab_size, self.max_len, self.num_layers = inner.vocab_size, inner.max_len, inner.num_layers
        self.device, self.dtype = inner.device, inner.dtype
        self.gumbel_stream, self.choose = inner.gumbel_stream, inner.choose
        self.traits = replace(inner.traits, can_be_captured=False, why_together="")
