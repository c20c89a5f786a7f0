"""The sum over ranks that the native pass of a share calls after each half layer, in place.

An exception cannot pass through C++. It is stored, later sums of the pass do nothing, and ``check`` raises it.
"""

from __future__ import annotations

import ctypes
from typing import final

import torch

from outrider.models.rank_sums import Joint

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@final
class SumsOverRanks:
    """A joint as a C function."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._error: BaseException | None = None
        self._callback = _Callback(self._sum)

    @property
    def address(self) -> int | None:
        return ctypes.cast(self._callback, ctypes.c_void_p).value

    def check(self) -> None:
        """Raise what went wrong in the pass that has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _sum(self, address: int, count: int) -> None:
        if self._error is not None:
            return
        try:
            values = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
            values.copy_(self._joint.sum(values))
        except BaseException as error:
            self._error = error
