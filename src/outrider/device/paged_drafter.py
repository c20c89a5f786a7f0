"""A drafter of captured rounds that stores its memory of slots in pages."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence

from outrider.core.device_round import DeviceDrafter
from outrider.device.slot_pages import SlotPages


class PagedDrafter(DeviceDrafter, ABC):
    """Answers questions about a drafter's memory, where that memory is ``SlotPages``."""

    def __init__(self, pages: SlotPages) -> None:
        self._pages = pages

    @property
    def version(self) -> int:
        return self._pages.version

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        self._pages.open(slots, batch_size=batch_size)

    def has_room(self, reaches: Mapping[int, int], *, batch_size: int) -> bool:
        return self._pages.has_room(reaches, batch_size=batch_size)

    def grow(self, reaches: Mapping[int, int], *, batch_size: int) -> None:
        self._pages.grow(reaches, batch_size=batch_size)

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        self._pages.release(batch_size, slots)

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        self._pages.move(old_size, new_size, slots)
