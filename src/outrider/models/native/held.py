"""The native pass on a model that is already in memory, such as a transformers model: its matrices stay where they are.

A held matrix is a table of its rows, like a stored one (``gguf/stored.py``): the address of each row, and the type ``HELD``.
Tables can be joined and reordered like matrices. Sixteen rows make a block, which is converted to the layout of the products
just before it is multiplied (``in_place.hpp``). So the results equal those of a packed model, bit for bit.

Norms and biases are small, and are copied if their type is not float32. After changing a model in place, open it again.

Logits are rounded to the type of the model, as its own head rounds them. In bfloat16, several tokens then often share the best
logit. The first of them is chosen, as by the model's own modules.
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
    """Tensors that another program part holds in memory. Matrices are tables of their rows."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        self.origin = origin
        self._tensors = tensors
        self._unread = set(tensors)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def are_read(self) -> bool:
        """Whether every tensor was used."""
        return not self._unread

    def read(self, name: str) -> Tensor:
        self._unread.discard(name)
        return self._tensors[name]

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = super().take(name, *shape)
        return tensor if tensor.dim() != 2 else _table(tensor)


def held_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], origin: str) -> NativeDecoder | None:
    """A decoder on ``tensors``, which are named as in a checkpoint; None if the native pass cannot run, or cannot read them
    where they are. It sees later changes of matrices. The tensors must live as long as the decoder."""
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
    """Whether the tensors have one device and one type, are contiguous, and consist of whole words."""
    alike = all(tensor.device == like.device and tensor.dtype == like.dtype for tensor in tensors.values())
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    return alike and all(one.is_contiguous() and one.shape[1] * one.element_size() % 4 == 0 for one in matrices)


def _table(matrix: Tensor) -> Tensor:
    """[out, 2] address and type of every row."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    begins = matrix.data_ptr() + row_bytes * torch.arange(len(matrix), dtype=STORED_ROWS)
    return torch.stack((begins, torch.full_like(begins, HELD)), 1)


def _are_blocks(layer: LayerWeights, config: ModelConfig) -> bool:
    """Whether the sixteen rows of every block are evenly spaced. Some rotary layouts move the rows of a head."""
    steps = [_steps(layer.qkv), _steps(layer.gate_up)]
    return config.mlp_size % _BLOCK == 0 and all(bool((found == found[0, 0]).all()) for found in steps)


def _steps(table: Tensor) -> Tensor:
    """[blocks, 15] bytes from each row of a block to the next."""
    return table[:, 0].unflatten(0, (-1, _BLOCK)).diff(dim=1)
