"""Training on many devices: each process reads its share of a batch; weights, gradients and optimizer state are divided.

``torchrun`` starts one process per device. FSDP2 (``fully_shard``) gathers the weights for a pass and scatters the gradients
after it (Zhao et al. 2023, arXiv 2304.11277; the division is ZeRO's, Rajbhandari et al. 2019, arXiv 1910.02054). The whole
objective is the module that is divided, so its parts may be called in any way inside it. The target is frozen and whole in
every process. Checkpoints are gathered and written by the first process: the same files as with one device.

    gradient = mean over processes of the gradient of each one's mean loss
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from outrider.core.errors import OptionError
from outrider.models.heads import PackedTexts
from outrider.train.data import Document
from outrider.train.objective import BatchOutcome, Objective

Value = TypeVar("Value")


@final
@dataclass(frozen=True)
class Team:
    """The processes of a run, and the rank of this one."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share_of(self, documents: Sequence[Document]) -> Sequence[Document]:
        """This process's part of a batch."""
        if len(documents) < self.size:
            raise OptionError(f"batch_size = {len(documents)} is less than the {self.size} processes; use at least one each")
        return documents[self.rank :: self.size]

    def agree(self, value: Value) -> Value:
        """The first process's value, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def everybodys(self, value: Value) -> list[Value]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def divided(self, objective: Objective) -> Callable[[PackedTexts], BatchOutcome]:
        """The objective with its module sharded among the processes. Replaces the module's parameters."""
        if self.size == 1:
            return objective
        module = _Whole(objective)
        fully_shard(module)
        return lambda batch: BatchOutcome(*module(batch))


def current_team() -> Team:
    """The team of the current process group."""
    return Team(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Team()


@contextmanager
def team_of_torchrun(device: str | None) -> Iterator[str | None]:
    """Join the process group that ``torchrun`` announces, if any; yields the device of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    on_gpu = torch.cuda.is_available() if device in (None, "auto") else str(device).startswith("cuda")
    mine = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(mine)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield mine
    finally:
        dist.destroy_process_group()


@final
class _Whole(nn.Module):
    """An objective as one module, so that its weights are gathered and scattered together."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.module = objective.module
        self._objective = objective

    def forward(self, batch: PackedTexts) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        found = self._objective(batch)
        return found.loss, found.hits, found.valid


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Full parameters in place of sharded ones, for saving. All processes must call this; nothing may be changed."""
    module.state_dict()  # whatever is still gathered from the last pass is divided again first
    divided: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if isinstance(parameter, DTensor):
                divided.append((part, name, parameter))
                part._parameters[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in divided:
            part._parameters[name] = parameter


def whole(value: Any) -> Any:
    """A nested state with its sharded tensors gathered. All processes must call this."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor, sharded like another one."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
