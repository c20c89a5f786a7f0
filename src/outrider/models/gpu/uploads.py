"""Copies of values to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor on the device. An ordinary copy waits until all earlier work has ended, so that the device idles
    while the host prepares the next. A copy from pinned memory is queued like other work."""
    held = torch.as_tensor(values, dtype=dtype)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)
