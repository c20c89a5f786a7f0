"""Triton kernels without a GPU: they are interpreted, from the first one that any test imports."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch


def can_interpret() -> bool:
    """Whether there are kernels, and no device to compile them for."""
    return importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


def interpret_kernels() -> None:
    """Kernels defined from now on are interpreted, and all must be: an interpreted one cannot call a compiled one.
    One-element arrays become numbers as they did before numpy 2.4."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
