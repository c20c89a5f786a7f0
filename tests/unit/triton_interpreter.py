"""Triton kernels on a CPU: import this before any module that defines one. The importing test is skipped without triton."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)


def _interpret() -> None:
    """Kernels defined from now on are interpreted; one-element arrays become numbers as they did before numpy 2.4."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched


if DEVICE.type == "cpu":
    _interpret()
