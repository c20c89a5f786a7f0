"""A stand-in for Apple's GPU on any machine: tensors on a device that refuses float64 and does not mix with the CPU.

It goes by the name of "meta", a device that every PyTorch knows and that nothing else here uses. A tensor of it holds one on
the CPU that the operators are run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "meta"
_CROSSING = ("aten::_to_copy", "aten::copy_", "aten::to")


class Away(Tensor):
    """A tensor on the stand-in."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        if held.dtype == torch.float64:
            raise TypeError("a tensor of float64 cannot be there")
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=NAME
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Away({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PassesDevice(TorchDispatchMode):
    """Within it, the device of that name is the stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = set[str]()
        """What was run there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, Away) for one in tree_flatten((args, kwargs))[0]):
            self.operators.add(func._schema.name)
        return _run(func, args, kwargs)


@torch.inference_mode(False)  # a tensor that holds another one has no place in it
def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given, name = tree_flatten((args, kwargs))[0], func._schema.name
    away = [one for one in given if isinstance(one, Away)]
    near = [one for one in given if isinstance(one, Tensor) and not isinstance(one, Away)]
    if away and name not in _CROSSING and any(one.dim() for one in near):
        raise RuntimeError(f"{name} mixes tensors there and on the CPU")
    wanted = kwargs.get("device")
    goes_away = bool(away) if wanted is None else torch.device(wanted).type == NAME
    if wanted is not None and goes_away:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda one: one.held if isinstance(one, Away) else one, (args, kwargs))
    found = func(*args, **kwargs)
    if name == "aten::copy_" or (name.endswith("_") and not name.endswith("__")):
        return given[0]
    return tree_map(lambda one: Away(one) if goes_away and isinstance(one, Tensor) else one, found)


_TENSOR = torch.tensor


def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """``torch.tensor``, which would make a tensor without numbers there."""
    made = _TENSOR(data, **options)
    return made if device is None else made.to(device)
