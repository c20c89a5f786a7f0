"""A table of named things whose look-up error says the nearest valid name. Names can be added, never changed."""

from __future__ import annotations

import re
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

    def add(self, name: str, item: Item) -> None:
        """Add an item. A name that is already taken is refused."""
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise OptionError(f"{self.noun} {name!r} is no name; use small letters and digits with hyphens, as in 'my-method'")
        if name in self._items:
            raise OptionError(f"there is a {self.noun} {name!r} already; choose another name")
        self._items[name] = item

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
