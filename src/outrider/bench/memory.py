"""Memory that a method adds: everything its parts refer to, counted by walking the objects.

The size of a process varies with allocators and caches; the memory that an object *keeps alive* does not. So references are
followed from the method and from the drafter's state. Tensors, arrays and containers are added up, each storage once, without
those that the target also holds. Packed weights without a visible storage are counted by their shape.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, str, bytes, int, float, complex)
"""Objects that the walk does not enter, because they lead to the whole program or nowhere."""


def added_bytes(parts: Iterable[Any], without: Iterable[Any]) -> int:
    """Bytes reachable from ``parts`` and not from ``without``."""
    known: dict[Any, int] = {}
    seen: set[int] = set()
    for item in _walk(without, seen):
        known.update(_storage(item))
    fresh: dict[Any, int] = {}
    for item in _walk(parts, seen):
        fresh.update(_storage(item))
    return sum(size for key, size in fresh.items() if key not in known)


def _walk(roots: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Every object reachable from the roots, once, except those already ``seen``."""
    pending = list(roots)
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _CLOSED):
            continue
        seen.add(id(item))
        yield item
        pending += _references(item)


def _references(item: Any) -> list[Any]:
    if isinstance(item, types.FunctionType):  # its globals are the program; its cells are what it remembers
        return [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
    if isinstance(item, Tensor | np.ndarray):
        return []
    return gc.get_referents(item)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _storage(item: Any) -> dict[Any, int]:
    """The memory behind an object, identified so that two views of it are the same."""
    if isinstance(item, Tensor):
        try:
            storage = item.untyped_storage()
            return {("tensor", storage.data_ptr(), storage.nbytes()): storage.nbytes()}
        except (RuntimeError, NotImplementedError):  # opaque layouts have no storage to ask
            return {("opaque", id(item)): item.numel() * item.element_size()}
    if isinstance(item, np.ndarray):
        base = item
        while isinstance(base.base, np.ndarray):
            base = base.base
        return {("array", base.__array_interface__["data"][0], base.nbytes): base.nbytes}
    return {("object", id(item)): sys.getsizeof(item)} if gc.is_tracked(item) else {}
