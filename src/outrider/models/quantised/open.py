"""Opens a quantised checkpoint without dequantising its matrices, if the device has products for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.core.layered_target import LayeredTarget
from outrider.models.decoder_choice import Speed
from outrider.models.decoder_weights import Weights
from outrider.models.features import ModelConfig
from outrider.models.gpu import can_run as gpu_can_run
from outrider.models.gpu.known import head_dim_for, missing_features
from outrider.models.native import native_decoder
from outrider.models.native.known import multiplies_stored
from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.format import Format
from outrider.models.quantised.packed_rows import PackedFolder
from outrider.models.quantised.stored import StoredFolder
from outrider.models.weights import TensorSource, read_weights


def stored_decoder(config: ModelConfig, folder: TensorSource, speed: Speed) -> LayeredTarget | None:
    """The CPU decoder that multiplies the quantised matrices of a folder as they are; None if they are not quantised, or it
    cannot."""
    if not isinstance(folder, QuantisedFolder) or not folder.form.stays or not multiplies_stored(config):
        return None
    source = StoredFolder(folder, reorders=not speed.float_inputs)
    weights = read_weights(source, config, dtype=torch.float32, device=torch.device("cpu"))
    source.warn()
    kept = replace(weights, file=source.memory, float_inputs=speed.float_inputs)
    return native_decoder(config, kept, page_len=speed.page_len)


def packed_weights(
    config: ModelConfig, folder: TensorSource, device: torch.device, *, rounds_inputs: bool = False
) -> Weights | None:
    """The weights of a folder for the fast decoder of a GPU, quantised matrices as they are; None where it cannot. With
    ``rounds_inputs``, these are e4m3 floats, and others are dequantised."""
    if not isinstance(folder, QuantisedFolder) or not stays_on_gpu(config, folder.form):
        return None
    if not gpu_can_run(config, torch.bfloat16, device):
        return None
    source = PackedFolder(folder, device, rounds_inputs=rounds_inputs)
    weights = read_weights(source, config, dtype=torch.bfloat16, device=device)
    if not rounds_inputs:
        source.warn()
    return replace(weights, rows=source.rows)


def stays_on_gpu(config: ModelConfig, form: Format) -> bool:
    """Whether the fast decoder multiplies the quantised matrices of such a model. Matrices of attention heads must not need
    padding."""
    if not form.packs or missing_features(config):
        return False
    return config.experts is not None if form.is_of_experts else head_dim_for(config) == config.head_dim
