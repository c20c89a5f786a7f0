"""A read-only table of named things whose look-up error says the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from outrider.core.errors import OptionError, nearest

Item = TypeVar("Item")


class Catalog(Mapping[str, Item], Generic[Item]):
    """``Catalog("method", {...})["drft-model"]`` raises: unknown method 'drft-model'; did you mean 'draft-model'?"""

    def __init__(self, noun: str, items: Mapping[str, Item]) -> None:
        self.noun = noun
        self._items = dict(items)

    def __getitem__(self, name: str) -> Item:
        if name not in self._items:
            raise OptionError(f"unknown {self.noun} {name!r}; {nearest(name, self._items)}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
