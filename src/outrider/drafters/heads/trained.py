"""Loads the trained heads that a row is built from, and checks that they are of the row's kind."""

from __future__ import annotations

from typing import TypeVar

from outrider.core.errors import ModelError
from outrider.core.method_rows import Parts
from outrider.models.heads import Head, load_head
from outrider.models.heads.frozen import quicken
from outrider.models.heads.kind import HeadKind

Module = TypeVar("Module", bound=Head)


def trained_head(parts: Parts, kind: HeadKind[Module]) -> Module:
    """The heads that the options name, ready to draft for the target. Heads of another kind are refused."""
    named = parts.options.heads
    head = named if isinstance(named, Head) else load_head(named, parts.target, ends=parts.options.target_folder)
    found = head.config.kind
    if found != kind.name:
        raise ModelError(f"{parts.options.heads} holds {found} heads and the method is {kind.name!r}; use method {found!r}")
    assert isinstance(head, kind.module), "a kind has one module"
    quicken(head, parts.options.bits)
    return head
