"""Named tensors of a checkpoint, read when asked for and held against what the model wants.

Files are memory-mapped. A wrong or damaged checkpoint fails here with its reason, not in a matrix product.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import ModelError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(ABC):
    """Named tensors of a checkpoint, read when asked for."""

    origin: str
    """The file or folder, for messages."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]: ...

    @abstractmethod
    def read(self, name: str) -> Tensor: ...

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must exist, be of this shape and hold real numbers."""
        if name not in self.names:
            raise ModelError(f"{self.origin}: tensor {name!r} is missing; the files are incomplete: fetch the model again")
        tensor = self.read(name)
        self.check_shape(name, tuple(tensor.shape), shape)
        if tensor.dtype not in _FLOATS:
            found = f"{self.origin}: tensor {name!r} is stored as {str(tensor.dtype).removeprefix('torch.')}"
            raise ModelError(f"{found}; only float32, bfloat16, float16 and float64 can be read: use an unquantised checkpoint")
        return tensor

    def check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Refuse a tensor that is not of the shape the model wants."""
        if found != wanted:
            what = f"{self.origin}: tensor {name!r} has shape {list(found)} but config.json asks for {list(wanted)}"
            raise ModelError(f"{what}; weights and config belong to different models: fetch both again")


class TensorDict(TensorSource):
    """Tensors in memory, forgotten once read so that none is held twice."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str = "tensors") -> None:
        self.origin = origin
        self._tensors = dict(tensors)
        self._names = frozenset(self._tensors)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str) -> Tensor:
        return self._tensors.pop(name)


class SafetensorsFolder(TensorSource):
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` names."""

    def __init__(self, folder: Path) -> None:
        self.origin = str(folder)
        self.files = _weight_files(folder)
        self._handles = {path: _open(path) for path in self.files}
        self._where = {name: handle for handle in self._handles.values() for name in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(handle.get_slice(name).get_shape()) for name, handle in self._where.items())

    @property
    def dtypes(self) -> list[str]:
        """Storage types, as the file names them."""
        return sorted({handle.get_slice(name).get_dtype() for name, handle in self._where.items()})

    def read(self, name: str) -> Tensor:
        try:
            return self._where[name].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(f"{self.origin}: tensor {name!r} cannot be read ({error}); fetch the model again") from error


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch the file again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ModelError(f"{index} is not a weight index ({error}); fetch the file again") from error
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name} is missing though {index.name} names it; fetch the model again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder} holds only pytorch_model.bin, a pickle, which can run code when opened and is not read; "
            "save it with transformers' save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{folder} holds no model.safetensors; it is not a complete model folder: fetch the model again")
