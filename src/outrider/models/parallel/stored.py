"""One rank's weights of a model whose matrices are of few bits: as they are stored, or rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from outrider.models.decoder_weights import Division, LayerWeights, Weights
from outrider.models.features import ModelConfig
from outrider.models.gguf import read_gguf
from outrider.models.gguf.stored import EMBEDDING, stored_tensors
from outrider.models.load import read_config
from outrider.models.packed import packed_if_in_groups, part_in_eight
from outrider.models.quantised.folder import QuantisedFolder, checkpoint
from outrider.models.quantised.gguf_planes import planes_source
from outrider.models.quantised.packed_rows import PackedFolder, PackedRows
from outrider.models.quantised.stored import StoredFolder
from outrider.models.share import Share
from outrider.models.weights import TensorSource, read_weights

_CUT = ("out", "down", "shared_down")
"""Matrices whose inputs are divided."""


def stored_share(path: Path, config: ModelConfig, share: Share, device: torch.device) -> Weights:
    """A rank's weights of a GGUF file or a quantised folder, codes and scales as they are."""
    return packed_share(path, config, share, device) if device.type == "cuda" else _on_cpu(path, config, share)


def _on_cpu(path: Path, config: ModelConfig, share: Share) -> Weights:
    """A share for a CPU. Rows stay where they are stored. Those of the embedding are floats, because they are summed over
    ranks."""
    if path.suffix == ".gguf":
        file = memory = read_gguf(str(path))
        source, embedding = stored_tensors(file), file.tensor(EMBEDDING)
    else:
        source = StoredFolder(_quantised(path))
        memory, name = source.memory, next(name for name in source.names if name.endswith("embed_tokens.weight"))
        embedding = source.read(name)
    weights = read_weights(source, config, dtype=torch.float32, device=torch.device("cpu"), share=share)
    return replace(weights, embedding=share.rows(embedding).float(), file=memory)


def packed_share(
    path: Path, config: ModelConfig, share: Share, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Weights:
    """A rank's weights for a GPU, with activations in ``dtype``. Matrices are cut layer by layer, so a rank never holds more
    than one whole layer beside its part."""
    if path.suffix == ".gguf":
        source, rows = planes_source(read_gguf(str(path)), device, dtype)
    else:
        source = PackedFolder(_quantised(path), device, dtype)
        rows = source.rows
    weights = read_weights(source, config, dtype=rows.dtype, device=device, share=replace(share, tables=rows))
    if isinstance(source, PackedFolder):
        source.warn()
    return replace(weights, rows=rows)


def _quantised(path: Path) -> QuantisedFolder:
    folder = checkpoint(path, read_config(path))
    assert isinstance(folder, QuantisedFolder), "units_of has seen it"
    return folder


def rounded_share(
    source: TensorSource,
    config: ModelConfig,
    share: Share,
    bits: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    """A rank's weights for a GPU, of a model that is rounded to ``bits``, with activations in ``dtype``."""
    rows = PackedRows(dtype)
    rounded = _Rounded(replace(share, tables=rows), rows, bits)
    return replace(read_weights(source, config, dtype=rows.dtype, device=device, share=rounded), rows=rows)


@final
@dataclass(frozen=True)
class _Rounded(Division):
    """A share of a rounded model. Matrices whose inputs are divided are rounded whole; the others are rounded later, output by
    output."""

    share: Share
    kept: PackedRows
    bits: int

    def layers(self, num_layers: int) -> Sequence[int]:
        return self.share.layers(num_layers)

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        cut = {name: each for name in _CUT if (each := vars(whole)[name]) is not None}
        return self.share.layer(config, replace(whole, **{name: self._table(matrix) for name, matrix in cut.items()}))

    def _table(self, matrix: Tensor) -> Tensor:
        """The table [.., out, 2] of a matrix [.., out, in], rounded."""
        return self.kept.table(packed_if_in_groups(matrix, self.bits)).view(*matrix.shape[:-1], 2)

    def rows(self, matrix: Tensor) -> Tensor:
        return self.share.rows(matrix)


@final
@dataclass(frozen=True)
class InEight(Division):
    """A share of a model that a CPU rounds to 8 bits, output by output. Where inputs are divided, the scale is that of all of
    them."""

    share: Share

    def layers(self, num_layers: int) -> Sequence[int]:
        return self.share.layers(num_layers)

    def layer(self, config: ModelConfig, whole: LayerWeights) -> LayerWeights:
        part = self.share.layer(config, whole)
        cut = {name: (vars(part)[name], each) for name in _CUT if (each := vars(whole)[name]) is not None}
        return replace(part, **{name: part_in_eight(*pair) for name, pair in cut.items()})

    def rows(self, matrix: Tensor) -> Tensor:
        return self.share.rows(matrix)
