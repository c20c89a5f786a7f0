"""PyTorch's attention without cuDNN, which makes a plan for every shape.

PyTorch prefers cuDNN's kernels on newer GPUs. cuDNN compiles a plan for each number of queries and keys, which takes longer
than many passes. A text has other numbers of keys in every pass, so no plan is used twice. The other kernels have none.
"""

from __future__ import annotations

from threading import Lock
from typing import final

import torch


@final
class WithoutCudnn:
    """Turns cuDNN's attention off while any thread is inside, and restores PyTorch's setting afterwards."""

    def __init__(self) -> None:
        self._lock, self._num_inside, self._was_on = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_on = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._was_on)


WITHOUT_CUDNN = WithoutCudnn()
