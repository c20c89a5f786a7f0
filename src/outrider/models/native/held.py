"""The native pass on a model that somebody holds in memory already: its matrices stay where they are.

A held matrix is a table of its rows, as that of a stored one is (``gguf/stored.py``): where a row begins in memory, and the
type ``HELD``. Rows are joined and reordered as those of any matrix. Sixteen of them make a block, which is turned into the
layout of the products just before it is multiplied (``in_place.hpp``). So the bits are those of a model that was packed.

Norms and biases are small and are copied where their type is not float32. Whoever changes a model in place opens it again.

Logits are rounded to the type of the model, as its own head rounds them. In bfloat16 several tokens often share the best logit
then, and the first of them is chosen, as by the model's own modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import HELD, STORED_ROWS, LayerWeights
from outrider.models.native.build import built_library
from outrider.models.native.decoder import NativeDecoder
from outrider.models.native.known import can_run, multiplies_stored
from outrider.models.weights import TensorSource, read_weights

_BLOCK = 16
_EMBEDDING = "embed_tokens.weight"


@final
class HeldTensors(TensorSource):
    """Tensors in somebody's memory. Matrices are tables of their rows."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        self.origin = origin
        self._tensors = tensors
        self._unread = set(tensors)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def are_read(self) -> bool:
        """Whether every tensor was asked for."""
        return not self._unread

    def read(self, name: str) -> Tensor:
        self._unread.discard(name)
        return self._tensors[name]

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = super().take(name, *shape)
        return tensor if tensor.dim() != 2 else _table(tensor)


def held_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], origin: str) -> NativeDecoder | None:
    """A decoder on ``tensors``, which are named as in a checkpoint; None where the native pass cannot run, or where they do not
    lie as it reads them. It sees what is changed in matrices, and reads memory that must live as long as it does."""
    embedding = next((tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING)), None)
    if embedding is None or config.experts is not None or not multiplies_stored(config):
        return None
    if not _lies_in_rows(tensors, embedding) or not can_run(config, embedding.dtype, embedding.device):
        return None
    source = HeldTensors(tensors, origin)
    try:
        read = read_weights(source, config, dtype=embedding.dtype, device=embedding.device)
    except ModelError:  # its modules are not those of the family
        return None
    weights = replace(read, embedding=embedding)
    fits = source.are_read and all(_are_blocks(layer, config) for layer in weights.layers)
    library = built_library() if fits else None
    return None if library is None else NativeDecoder(library, config, weights, logit_type=embedding.dtype)


def _lies_in_rows(tensors: Mapping[str, Tensor], like: Tensor) -> bool:
    """All on one device, of one type, from end to end, in whole words."""
    alike = all(tensor.device == like.device and tensor.dtype == like.dtype for tensor in tensors.values())
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    return alike and all(one.is_contiguous() and one.shape[1] * one.element_size() % 4 == 0 for one in matrices)


def _table(matrix: Tensor) -> Tensor:
    """[out, 2] where every row begins, and the type."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    begins = matrix.data_ptr() + row_bytes * torch.arange(len(matrix), dtype=STORED_ROWS)
    return torch.stack((begins, torch.full_like(begins, HELD)), 1)


def _are_blocks(layer: LayerWeights, config: ModelConfig) -> bool:
    """Whether sixteen rows that are multiplied together lie together: some rotary layouts move the rows of a head."""
    steps = [_steps(layer.qkv), _steps(layer.gate_up)]
    return config.mlp_size % _BLOCK == 0 and all(bool((found == found[0, 0]).all()) for found in steps)


def _steps(table: Tensor) -> Tensor:
    """[blocks, 15] bytes from a row to the next within sixteen."""
    return table[:, 0].unflatten(0, (-1, _BLOCK)).diff(dim=1)
