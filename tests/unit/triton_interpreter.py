"""Where tests of Triton kernels run: on a GPU, or interpreted (``tests/interpreter.py``). Without triton they are skipped."""

from __future__ import annotations

import importlib.util

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)
