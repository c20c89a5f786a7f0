"""Communication between the ranks of a divided model, in a process group separate from any other of the program.

A sum over ranks is gathered and then added in rank order, on every rank alike. So its bits do not depend on timing, on the
number of values or on what shares a pass, as those of a ring would. NCCL connects GPUs, one per rank; gloo connects everything
else (CPUs, or several ranks on one GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.models.rank_sums import Joint
from outrider.models.share import Share

PATIENCE = timedelta(seconds=120)
"""Longest time that a rank waits for another inside a pass. A dead rank is noticed at once."""
_HOST = "127.0.0.1"
_dist: Any = dist
"""PyTorch's module of process groups, whose names the type stubs do not export."""


def open_store() -> Any:
    """The store through which the ranks of one machine find each other, at ``port``."""
    return _dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


def find_store(port: int) -> Any:
    return _dist.TCPStore(_HOST, port, is_master=False, timeout=PATIENCE)


def backend_of(device: torch.device, size: int) -> str:
    """The communication library: NCCL if every rank has its own GPU, else gloo."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"


@final
class Link(Joint):
    """One rank's connection to the others. It is made before the others exist; ``connect`` waits for them."""

    def __init__(self, share: Share, vocab_size: int, *, is_wired: bool = True) -> None:
        self.share, self.rank, self.is_wired = share, share.rank, is_wired
        self.spans = [Share(rank, share.size).span(vocab_size) for rank in range(share.size)]
        self.on_tell: Callable[[str, Sequence[Any]], object] = lambda *_: None
        """Called to tell the followers of this rank what to do."""
        self._group: Any = None

    def connect(self, store: Any, device: torch.device) -> None:
        rank, size = self.share.rank, self.share.size
        if backend_of(device, size) == "nccl":
            self._group = _dist.ProcessGroupNCCL(store, rank, size, PATIENCE)
        else:
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = PATIENCE
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_HOST)]  # a host's name may resolve to nothing
            self._group = _dist.ProcessGroupGloo(store, rank, size, options)

    def gather(self, values: Tensor) -> list[Tensor]:
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.share.size)]
        self._connected.allgather([parts], [values]).wait()
        return parts

    def of(self, rank: int, values: Tensor) -> Tensor:
        sent, options = values.clone(memory_format=torch.contiguous_format), _dist.BroadcastOptions()
        options.rootRank = rank
        self._connected.broadcast([sent], options).wait()
        return sent

    def tell(self, verb: str, *arguments: Any) -> None:
        self.on_tell(verb, arguments)

    def abort(self) -> None:
        """Abort everything that waits for a rank that is gone, also kernels of captured rounds."""
        if self._group is not None:
            self._group.abort()

    @property
    def _connected(self) -> Any:
        assert self._group is not None, "ranks are connected before the first pass"
        return self._group
