"""Describes a checkpoint from its headers alone, without reading weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.config import ModelConfig, config_of, why_not_lean
from outrider.models.gguf import hf_config, read_gguf
from outrider.models.gguf.stored import is_fast_as_stored
from outrider.models.gpu.known import missing_features as gpu_missing
from outrider.models.load import read_config
from outrider.models.native import can_build, floats_kept, isa_here
from outrider.models.native.known import missing_features as cpu_missing
from outrider.models.native.known import multiplies_stored
from outrider.models.quantised.folder import QuantisedFolder
from outrider.models.quantised.format import Format
from outrider.models.quantised.formats import format_of, unknown_method
from outrider.models.quantised.gguf_planes import why_not_on_gpu
from outrider.models.quantised.open import stays_on_gpu
from outrider.models.recurrent import RecurrentConfig, recurrent_config
from outrider.models.source import local_path
from outrider.models.weights import SafetensorsFolder


@dataclass(frozen=True)
class ModelInfo:
    """The output of ``outrider info``."""

    name: str
    family: str
    runs_on: str
    """Our lean decoder, or transformers' own modules through the adapter."""
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_len: int
    dtype: str
    gpu_path: str
    """Which decoder a 16-bit model takes on a CUDA device, and why not the fast one."""
    cpu_path: str
    """Which decoder it takes on a CPU, and why not the native one."""
    on_cpu: str
    """How ``dtype="auto"`` multiplies it on a CPU."""
    on_gpu: str
    """How ``dtype="auto"`` multiplies it on a CUDA device."""
    same_bits: str
    """Where a node's scores are independent of what shares its pass (``TargetTraits.is_invariant``)."""
    kv_cache: str
    """Types in which ``kv_cache`` may store keys and values, and bytes of a token in the model's own 16 bits."""
    files: tuple[str, ...]
    num_bytes: int


def describe_model(name: str) -> ModelInfo:
    path = local_path(name)
    if path.suffix == ".gguf":
        file = read_gguf(str(path))
        count = sum(math.prod(entry.shape) for entry in file.tensors.values())
        kinds = sorted({entry.storage.name for entry in file.tensors.values()})
        is_stored = is_fast_as_stored(file, floats=floats_kept())
        return _info(name, hf_config(file), [path], count, " ".join(kinds), is_stored=is_stored)
    raw, folder = read_config(path), SafetensorsFolder(path)
    form = None if unknown_method(raw) else format_of(raw)
    if form is None:
        return _info(name, raw, folder.files, folder.num_parameters, " ".join(folder.dtypes))
    quantised = QuantisedFolder(folder, form)
    return _info(name, raw, folder.files, quantised.num_parameters, form.title, is_stored=form.stays, form=form)


def _runs_on(config: ModelConfig | None, recurrent: RecurrentConfig | None) -> str:
    if recurrent is None:
        return "transformers adapter" if config is None else "lean decoder"
    total, attending = recurrent.num_layers, recurrent.num_attention_layers
    others = f"; {attending} with attention" if attending else ""
    return f"lean decoder with recurrent layers ({recurrent.scan.num_layers} of {total}{others})"


def _same_bits(config: ModelConfig | None, recurrent: RecurrentConfig | None) -> str:
    """Where speculative and batched text equals plain text bit for bit, in words."""
    if recurrent is not None:
        return "nowhere (PyTorch's products round by their shape: near ties can fall otherwise in a batch or a tree)"
    if config is None:
        return "nowhere (transformers' passes round by their shape: near ties can fall otherwise in a batch or a tree)"
    on_gpu = "" if gpu_missing(config) else "on a GPU, with weights of 16 bits"
    here = "" if can_build() else "; not here: the native pass needs a C++ compiler and OUTRIDER_NATIVE not 0"
    on_cpu = "" if cpu_missing(config) else f"on a CPU in float32, bfloat16, float16, int8 and as stored (native passes{here})"
    return "; ".join(filter(None, (on_cpu, on_gpu))) or "nowhere (PyTorch's passes round by their shape)"


def _kv_cache(config: ModelConfig | None, recurrent: RecurrentConfig | None) -> str:
    """How keys and values may be stored, in words."""
    if recurrent is not None or config is None:
        return "in the model's own type alone"
    numbers = config.num_layers * config.num_kv_heads * config.head_dim * config.cache_sides
    own = f"{2 * numbers:,} bytes a token in 16 bits"
    if config.latent is not None:
        return f"{own}; latents stay in the model's own type"
    coded = numbers + 4 * numbers // config.head_dim
    native = "" if cpu_missing(config) else "; not in the native pass of a CPU"
    return f"{own}; {coded:,} with kv_cache='int8' or 'fp8', which change scores a little{native}"


def _path(fast: str, config: ModelConfig | None, raw: dict[str, Any], missing: Callable[[ModelConfig], list[str]]) -> str:
    """The decoder a model takes on a device, in words."""
    if recurrent_config(raw) is not None:
        return "PyTorch's lean decoder, with native scans or kernels in recurrent layers"
    if config is None:
        return f"transformers adapter: {why_not_lean(raw)}"
    lacking = missing(config)
    return fast if not lacking else f"PyTorch's lean decoder: the faster one has no {'; no '.join(lacking)}"


def _on_cpu(config: ModelConfig | None, *, is_stored: bool, form: Format | None) -> str:
    """How ``dtype="auto"`` multiplies the matrices on a CPU, in words."""
    if is_stored and config is not None and multiplies_stored(config) and can_build():
        for_halves = "to 16 bits for F16" if isa_here().adds_halves else "not for F16 and BF16"
        return f"as stored, activations rounded to 8 bits as in llama.cpp, {for_halves} (dtype='float32' dequantises instead)"
    if form is not None:
        return (
            "dequantised: in bfloat16 where the CPU is fast in it and the checkpoint's other tensors are, in float32 otherwise"
        )
    return "in bfloat16 where the CPU is fast in it and the checkpoint has 16 bits, in float32 otherwise"


def _on_gpu(config: ModelConfig | None, form: Format | None, *, is_gguf: bool) -> str:
    """How ``dtype="auto"`` multiplies the matrices on a CUDA device, in words."""
    if is_gguf and config is not None and not why_not_on_gpu(config):
        return "dequantised: in bfloat16 (dtype='stored' keeps the blocks of the file)"
    if form is None:
        return "in bfloat16"
    if config is not None and stays_on_gpu(config, form):
        return "codes as they are, activations in bfloat16 (dtype='bfloat16' dequantises instead)"
    return "dequantised: in bfloat16"


def _info(
    name: str,
    raw: dict[str, Any],
    files: list[Path],
    num_parameters: int,
    dtype: str,
    *,
    is_stored: bool = False,
    form: Format | None = None,
) -> ModelInfo:
    text = raw.get("text_config", raw)
    recurrent = recurrent_config(raw)
    config = config_of(raw) if recurrent is None else recurrent.attention
    sizes = recurrent or config
    return ModelInfo(
        name=name,
        family=str(raw.get("model_type")),
        runs_on=_runs_on(config, recurrent),
        num_parameters=num_parameters,
        num_layers=sizes.num_layers if sizes else text.get("num_hidden_layers", 0),
        hidden_size=sizes.hidden_size if sizes else text.get("hidden_size", 0),
        num_heads=config.num_heads if config else text.get("num_attention_heads", 0),
        num_kv_heads=config.num_kv_heads if config else text.get("num_key_value_heads", 0),
        vocab_size=sizes.vocab_size if sizes else text.get("vocab_size", 0),
        max_len=sizes.max_len if sizes else text.get("max_position_embeddings", 0),
        dtype=dtype,
        gpu_path=_path("fast decoder (fused kernels, captured passes)", config, raw, gpu_missing),
        cpu_path=_path("native pass", config, raw, cpu_missing),
        on_cpu=_on_cpu(config, is_stored=is_stored, form=form),
        on_gpu=_on_gpu(config, form, is_gguf=files[0].suffix == ".gguf"),
        same_bits=_same_bits(config, recurrent),
        kv_cache=_kv_cache(config, recurrent),
        files=tuple(path.name for path in files),
        num_bytes=sum(path.stat().st_size for path in files),
    )
