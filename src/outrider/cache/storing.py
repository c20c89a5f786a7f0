"""Targets whose keys and values may be stored in another type than the model's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TypeVar

from outrider.cache.page_pool import PagePool
from outrider.core.interfaces import Target
from outrider.core.key_storage import KeyStorage, not_available


class StoringTarget(Target, ABC):
    """A target whose caches are pages of one pool, which may store codes."""

    @abstractmethod
    def pool_of_codes(self, storage: KeyStorage) -> PagePool:
        """The pool of all caches; no cache may exist yet. Raises an ``OptionError`` with the reason if the model or the device
        cannot store keys in this type."""

    def store_keys(self, storage: KeyStorage) -> None:
        """Store the keys and values of all caches in this type from now on."""
        self.pool_of_codes(storage).store_as(storage)
        self.traits = replace(self.traits, kv_cache=storage.name)


AnyTarget = TypeVar("AnyTarget", bound=Target)


def stored_in(target: AnyTarget, storage: KeyStorage) -> AnyTarget:
    """The target, with keys and values stored in this type. Refused with the type's name if the target cannot."""
    if storage.is_rounded:
        if not isinstance(target, StoringTarget):
            why = f"{type(target).__name__} stores keys in the model's own type alone (fast=False may take a decoder that can)"
            raise not_available(storage, why)
        target.store_keys(storage)
    return target
