"""The groups of inputs that must stay together when matrices of few bits are divided among ranks.

Inputs that share a scale stay together, so that a rank's codes and scales are those of the whole matrix. Heads divide evenly,
so the heads of a rank must make up whole groups. Columns of an MLP are divided in whole groups, so ranks may differ by one
group.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from outrider.core.errors import OptionError
from outrider.models.dtypes import EIGHT_BITS, FEW_BITS, ROUNDED_INPUTS, STORED
from outrider.models.features import ModelConfig
from outrider.models.gguf import GGUFFile, read_gguf
from outrider.models.gguf.stored import SPAN, is_fast_as_stored
from outrider.models.gpu import can_run as gpu_can_run
from outrider.models.gpu.known import head_dim_for, missing_features
from outrider.models.load import read_config
from outrider.models.native import floats_kept
from outrider.models.native.known import multiplies_stored
from outrider.models.packed import GROUP
from outrider.models.quantised.folder import QuantisedFolder, checkpoint
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.gguf_planes import why_not_on_gpu
from outrider.models.quantised.open import stays_on_gpu
from outrider.models.quantised.packed_rows import unit_of
from outrider.models.stored_rows import block_len

_HEADS, _COLUMNS = ("attn_output", "o_proj"), ("ffn_down", "ffn_down_exps", "down_proj")
"""Matrices whose inputs are divided, as files name them: those after attention, and those after an MLP's columns."""


class Units(NamedTuple):
    """Number of neighbouring inputs that stay together: after attention, and after an MLP's columns."""

    heads: int = 1
    columns: int = 1


def units_of(path: Path, config: ModelConfig, size: int, dtype: str | None, place: torch.device, *, fast: bool) -> Units:
    """The units of a model opened in a type. Refuses a model whose shares would not be parts of the whole."""
    if dtype not in FEW_BITS and dtype != STORED:
        return Units()
    what = f"dtype = {dtype!r} is not available with tensor_parallel = {size} for {path}"
    if not fast:
        raise OptionError(f"{what}: it needs fast=True; use 'bfloat16'")
    units = _stored(what, path, config, place) if dtype == STORED else _rounded(what, config, dtype, place)
    seen = config.num_heads * (config.head_dim if config.latent is None else config.latent.value_dim)
    uneven = {"heads": units.heads} if seen % (units.heads * size) else {}
    columns = units.columns
    uneven |= {name: columns for name, width in _columns(config).items() if width % columns or width < columns * size}
    for name, unit in uneven.items():
        raise OptionError(f"{what}: its {name} do not come in groups of {unit} for every rank; use 'bfloat16'")
    return units


def kept_by_auto(path: Path, place: torch.device) -> bool:
    """Whether one process keeps the matrices of this checkpoint as they are stored when no type is asked for."""
    if path.suffix == ".gguf":
        return place.type == "cpu" and is_fast_as_stored(read_gguf(str(path)), floats=floats_kept())
    form = format_of(read_config(path))
    return form is not None and not form.reorders and (form.packs if place.type == "cuda" else form.stays)


def _columns(config: ModelConfig) -> dict[str, int]:
    """Sizes of the MLPs, which are divided by columns."""
    experts = config.experts
    found = {"MLP columns": config.mlp_size} if experts is None or not all(experts.layers) else {}
    if experts is not None:
        found["columns of experts"] = experts.size
        found |= {"columns beside experts": experts.shared_size} if experts.shared_size else {}
    return found


def _rounded(what: str, config: ModelConfig, dtype: str, place: torch.device) -> Units:
    """Units of matrices that are rounded when they are read."""
    if place.type == "cpu":
        if dtype == EIGHT_BITS:
            return Units()
        if config.hidden_size % SPAN:
            raise OptionError(f"{what}: its states do not come in groups of {SPAN}; use 'bfloat16'")
        return Units(SPAN, SPAN)
    if dtype == ROUNDED_INPUTS:
        raise OptionError(f"{what}: ranks of GPUs do not round inputs; use 'int8'")
    bits, lacks = FEW_BITS[dtype], missing_features(config)
    lacks += [] if head_dim_for(config) == config.head_dim else [f"heads of {config.head_dim}"]
    if lacks or not gpu_can_run(config, torch.bfloat16, place):
        raise OptionError(f"{what}: no kernel for {'; '.join(lacks) or place}; use 'bfloat16'")
    unit = GROUP if bits == 4 else SPAN
    return Units(unit, unit)


def _stored(what: str, path: Path, config: ModelConfig, place: torch.device) -> Units:
    """Units of matrices that stay as the checkpoint has them."""
    is_gguf, on_gpu = path.suffix == ".gguf", place.type == "cuda"
    file = read_gguf(str(path)) if is_gguf else checkpoint(path, read_config(path))
    if isinstance(file, GGUFFile):
        lacks = why_not_on_gpu(config) if on_gpu else []
    elif isinstance(file, QuantisedFolder) and file.form.reorders:
        raise OptionError(f"{what}: with act-order, a rank's inputs are not whole groups; use 'bfloat16'")
    elif isinstance(file, QuantisedFolder) and (file.form.packs if on_gpu else file.form.stays):
        lacks = [] if not on_gpu or stays_on_gpu(config, file.form) else ["this architecture with such matrices"]
    else:
        raise OptionError(f"{what}: its matrices are not stored in blocks; use 'auto', or 'w8a8' for weights of 8 bits")
    can_run = gpu_can_run(config, torch.bfloat16, place) if on_gpu else place.type == "cpu" and multiplies_stored(config)
    if lacks or not can_run:
        why = f"no kernel for {'; '.join(lacks) or place}" if on_gpu else "it needs the native pass of a CPU, or a GPU"
        raise OptionError(f"{what}: {why}; use 'bfloat16'")
    if isinstance(file, GGUFFile):
        return Units(_longest_block(file, _HEADS), _longest_block(file, _COLUMNS))
    assert isinstance(file, QuantisedFolder)
    return Units(_longest_group(file, _HEADS), _longest_group(file, _COLUMNS)) if on_gpu else Units(SPAN, SPAN)


def _longest_block(file: GGUFFile, names: tuple[str, ...]) -> int:
    """Inputs of the longest block of such matrices."""
    found = (entry for name, entry in file.tensors.items() if name.split(".")[-2] in names)
    return max((block_len(entry.storage.name) for entry in found), default=SPAN)


def _longest_group(folder: QuantisedFolder, names: tuple[str, ...]) -> int:
    """Inputs of the longest group of such matrices in the first layer that has some; other layers are checked when they are
    cut."""
    for name in sorted(folder.quantised_names):
        stem = name.removesuffix(".weight").rpartition(".")[-1]
        matrix = folder.matrix(name) if stem in names else None
        if matrix is not None:
            return unit_of(matrix)
    return 1
