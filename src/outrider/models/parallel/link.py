"""The wires between the ranks of a divided model: a process group of its own, beside any that a program already has.

A sum over ranks is gathered and added in rank order, on every rank alike. So its bits depend neither on the number of values
nor on timing, as those of a ring do: what shares a pass cannot change them. NCCL connects GPUs, one per rank; gloo connects
everything else (CPUs, or several ranks on one GPU).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.models.joint import Joint
from outrider.models.share import Share

PATIENCE = timedelta(seconds=120)
"""Longest that a rank waits for another inside a pass; a rank that died is noticed at once."""
_HOST = "127.0.0.1"
_dist: Any = dist
"""Groups and stores by their own names, which the type stubs do not export."""


def open_store() -> Any:
    """Where the ranks of one machine find each other; ``port`` names it."""
    return _dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


def find_store(port: int) -> Any:
    return _dist.TCPStore(_HOST, port, is_master=False, timeout=PATIENCE)


def backend_of(device: torch.device, size: int) -> str:
    """NCCL wants a GPU for every rank."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"


@final
class Link(Joint):
    """One rank's end of the wires. Built before the others are there; ``connect`` waits for them."""

    def __init__(self, share: Share, vocab_size: int) -> None:
        self.share = share
        self.first_token = share.span(vocab_size)[0]
        self._spans = [Share(rank, share.size).span(vocab_size) for rank in range(share.size)]
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

    def sum(self, values: Tensor) -> Tensor:
        parts = self.gather(values)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(values.dtype)

    def of(self, rank: int, values: Tensor) -> Tensor:
        return self.gather(values)[rank]

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's ``values``, which are of one size, by rank."""
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.share.size)]
        self._connected.allgather([parts], [values]).wait()
        return parts

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        """[..., V] from every rank's own columns [..., V / size]; shares differ by a column at most."""
        widest = max(end - begin for begin, end in self._spans)
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[-1]))
        found = self.gather(padded)
        return torch.cat([part[..., : end - begin] for part, (begin, end) in zip(found, self._spans, strict=True)], -1)

    def best(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The token of the largest value of all ranks, the first of equals: as ``argmax`` over the whole vocabulary."""
        all_values, all_tokens = torch.stack(self.gather(values)), torch.stack(self.gather(tokens))
        return all_tokens.gather(0, all_values.argmax(0, keepdim=True))[0]

    @property
    def _connected(self) -> Any:
        assert self._group is not None, "ranks are connected before the first pass"
        return self._group
