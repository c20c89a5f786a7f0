"""Open a model by name: a folder, a hub name or a GGUF file.

The lean decoder runs it if it supports the architecture; otherwise Hugging Face's own modules do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from outrider.cache.storing import stored_in
from outrider.core.allocator import give_back
from outrider.core.errors import ModelError, OptionError, nearest
from outrider.core.interfaces import Target
from outrider.core.key_storage import storage_named
from outrider.core.layered_target import LayeredTarget
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.decoder_choice import Running, Speed, refuse
from outrider.models.dtypes import EXACT, FEW_BITS, ROUNDED_INPUTS, STORED, auto_dtype, computing_dtype, dtype_named
from outrider.models.gguf import GGUFFile, hf_config, hf_tensors, read_gguf
from outrider.models.gguf.stored import is_fast_as_stored, stored_tensors
from outrider.models.gpu import check_numerics, gpu_decoder
from outrider.models.host_side import check_mps, host_side
from outrider.models.native import fastest_decoder, floats_kept, native_decoder
from outrider.models.quantised.float8 import float8_decoder
from outrider.models.quantised.folder import checkpoint
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.gguf_planes import gguf_planes, why_not_on_gpu
from outrider.models.quantised.open import packed_weights, stored_decoder
from outrider.models.quantised.weight_rounding import rounded_decoder
from outrider.models.recurrent import RecurrentConfig, RecurrentDecoder, recurrent_config
from outrider.models.reduced import ReducedDraft, spoken_ids
from outrider.models.source import Source, local_path
from outrider.models.weights import SafetensorsFolder, TensorDict, TensorSource, Weights, read_weights


def load_model(
    name: str | Source,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_len: int | None = None,
    kv_cache: str = "auto",
    **running: Unpack[Running],
) -> Target:
    """The model called ``name``.

    ``dtype`` None or "auto" picks the fastest safe type. The types "int8" and "int4" round the weights and so change the
    model; "w8a8" also rounds the inputs of products, to e4m3 floats on a GPU. Quantised matrices are kept by "auto" if the
    device has a product for them; those of GGUF files are dequantised on a GPU. Any other type dequantises, but "w8a8" keeps
    e4m3 floats there. The type "stored" requires that they are kept. On a CPU inputs are rounded to 8 bits then; on a GPU a
    weight is rounded to bfloat16. "stored-exact" (CPU) rounds no inputs: scores are those of "float32".

    ``max_len`` opens a model whose rotary scaling depends on the context (longrope, dynamic) for more than its original
    length. ``fast`` False takes the plain PyTorch decoder even if a faster one exists. ``numerics`` "invariant" requires
    scores that do not depend on what shares a pass (``models.gpu.NUMERICS``). ``page_len`` keeps keys and values in pages
    of that many tokens, which rows can share (0: 64, but no pages in the plain PyTorch decoder). ``kv_cache`` "fp8" or
    "int8" stores them in 8 bits (``core/key_storage.py``), which changes scores a little."""
    if max_len is not None and max_len < 1:
        raise OptionError(f"max_len = {max_len} is not valid; use a positive number of tokens")
    storage, place, speed = storage_named(kv_cache), device_of(device), _speed(dtype, **running)
    target = _load(name if isinstance(name, Source) else Source(name), dtype, place, max_len=max_len, speed=speed)
    give_back()  # weights that were packed leave a second copy of the model's size behind, as free pages
    return host_side(stored_in(target, storage))


def _load(source: Source, dtype: str | None, place: torch.device, *, max_len: int | None, speed: Speed) -> Target:
    if dtype in (STORED, EXACT):
        return _load_stored(local_path(source), place, max_len=max_len, speed=speed)
    wanted = torch.bfloat16 if speed.bits < 16 else dtype_named(dtype)
    path = local_path(source)
    if path.suffix == ".gguf":
        return _load_gguf(path, wanted, place, max_len=max_len, speed=speed)
    raw = read_config(path)
    config = config_of(raw)
    recurrent = recurrent_config(raw)
    if recurrent is not None:
        return _recurrent(recurrent, path, wanted, place, max_len=max_len, speed=speed)
    if config is None:
        refuse(speed)
        if speed.page_len:
            raise OptionError(f"page_len = {speed.page_len} is not available: transformers runs this model; leave it out")
        from outrider.models.hf import HFModel, check_quantisation

        check_quantisation(raw)
        dtype_used = wanted or auto_dtype(raw.get("dtype") or raw.get("torch_dtype"), place)
        trusted = source.trust_remote_code
        return HFModel.load(path, dtype=dtype_used, device=place, max_len=max_len, trust_remote_code=trusted)
    folder = checkpoint(path, raw)
    ids = spoken_ids(raw, folder)
    stays = ids is None and (wanted is None or (speed.rounds_inputs and place.type == "cuda"))
    if stays and (kept := _kept(config, folder, place, max_len=max_len, speed=speed)) is not None:
        return kept
    used = wanted or auto_dtype(config.dtype, place)
    return _decoder(config, folder, dtype=used, device=place, max_len=max_len, speed=speed, ids=ids)


def lean_config(path: Path) -> ModelConfig:
    """The config of a folder or GGUF file that the lean decoder runs."""
    if path.suffix == ".gguf":
        return _gguf_config(read_gguf(str(path)))
    config = config_of(read_config(path))
    if config is None:
        what = f"{path} is run by transformers' own modules, which are not divided"
        raise OptionError(f"{what}; leave tensor_parallel and draft_parallel out")
    return config


def lean_checkpoint(
    path: Path, *, dtype: str | None, device: torch.device, max_len: int | None
) -> tuple[ModelConfig, TensorSource, torch.dtype]:
    """The config, tensors and type with which the lean decoder opens a folder or a GGUF file."""
    config, is_gguf = lean_config(path), path.suffix == ".gguf"
    used = computing_dtype(dtype, "bfloat16" if is_gguf else config.dtype, device)
    if is_gguf:
        source: TensorSource = TensorDict(dict(hf_tensors(read_gguf(str(path)), dtype=used)), str(path))
    else:
        source = checkpoint(path, read_config(path))
    return config if max_len is None else replace(config, max_len=max_len), source, used


def _recurrent(
    config: RecurrentConfig, path: Path, dtype: torch.dtype | None, device: torch.device, *, max_len: int | None, speed: Speed
) -> RecurrentDecoder:
    """A model with recurrent layers. One decoder runs them all; its scans may be native or kernels."""
    refuse(speed)
    if speed.page_len:
        what = f"page_len = {speed.page_len} is not available for this model"
        raise OptionError(f"{what}: a recurrent state has no pages ({config.family}); leave it out")
    if max_len is not None:
        config = replace(config, max_len=max_len)
    used = dtype or auto_dtype(config.dtype, device)
    return RecurrentDecoder(config, SafetensorsFolder(path), dtype=used, device=device, fast=speed.fast)


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device, *, max_len: int | None, speed: Speed) -> Target:
    file = read_gguf(str(path))
    can_stay = dtype is None and device.type == "cpu" and speed.fast
    as_stored = can_stay and is_fast_as_stored(file, floats=floats_kept())
    if as_stored and (decoder := _stored_decoder(file, max_len, speed)) is not None:
        return decoder
    dtype = dtype or auto_dtype("bfloat16", device)  # the file's own rounding is coarser
    source = TensorDict(dict(hf_tensors(file, dtype=dtype)), str(path))
    return _decoder(_gguf_config(file), source, dtype=dtype, device=device, max_len=max_len, speed=speed)


def _gguf_config(file: GGUFFile) -> ModelConfig:
    config = config_of(hf_config(file))
    if config is None:
        raise ModelError(f"{file.path}: this architecture is not supported as GGUF; load its Hugging Face checkpoint")
    return config


def _load_stored(path: Path, device: torch.device, *, max_len: int | None, speed: Speed) -> LayeredTarget:
    what = f"dtype = {(EXACT if speed.float_inputs else STORED)!r} is not available"
    is_gguf = path.suffix == ".gguf"
    on_gpu, form = device.type == "cuda", None if is_gguf else format_of(read_config(path))
    if not is_gguf and (form is None or not (form.packs if on_gpu else form.stays)):
        there = "a GPU" if on_gpu else "a CPU"
        why = "which is not a GGUF file" if form is None else f"whose matrices ({form.title}) are dequantised on {there}"
        raise OptionError(f"{what} for {path}, {why}; use 'auto', or 'int8' for weights of 8 bits")
    if speed.float_inputs and device.type != "cpu":
        raise OptionError(f"{what} on this device; use device='cpu', or dtype = 'float32', which gives the same scores")
    if device.type not in ("cpu", "cuda") or not speed.fast:
        raise OptionError(f"{what} here; use device='cpu' or 'cuda', and fast=True")
    if not is_gguf:
        decoder = _kept(lean_config(path), checkpoint(path, read_config(path)), device, max_len=max_len, speed=speed)
    elif on_gpu:
        decoder = _planes_decoder(read_gguf(str(path)), device, max_len, speed)
    else:
        decoder = _stored_decoder(read_gguf(str(path)), max_len, speed)
    if decoder is None:
        raise OptionError(f"{what} for {path} on this machine: {_why_not_stored(path, on_gpu=on_gpu)}")
    return decoder


def _why_not_stored(path: Path, *, on_gpu: bool) -> str:
    if not on_gpu:
        return "it needs a C++ compiler, OUTRIDER_NATIVE not 0, and heads of a multiple of 16; use 'float32'"
    missing = why_not_on_gpu(lean_config(path)) if path.suffix == ".gguf" else []
    return f"the fast decoder has no {'; no '.join(missing)}; use 'bfloat16'" if missing else "it needs triton; use 'bfloat16'"


def _planes_decoder(file: GGUFFile, device: torch.device, max_len: int | None, speed: Speed) -> LayeredTarget | None:
    """A decoder that multiplies the file's matrices as stored on a GPU, with cache and activations in bfloat16."""
    config = _gguf_config(file)
    config = config if max_len is None else replace(config, max_len=max_len)
    weights = gguf_planes(config, file, device)
    return None if weights is None else _of_weights(config, weights, speed)


def _stored_decoder(file: GGUFFile, max_len: int | None, speed: Speed) -> LayeredTarget | None:
    """A decoder that multiplies the file's matrices as stored, with cache and residual stream in float32. None without
    the native pass."""
    config = _gguf_config(file)
    config = config if max_len is None else replace(config, max_len=max_len)
    weights = read_weights(stored_tensors(file), config, dtype=torch.float32, device=torch.device("cpu"))
    decoder = native_decoder(config, replace(weights, file=file, float_inputs=speed.float_inputs), page_len=speed.page_len)
    file.forget(0, len(file.data))  # what lies between two matrices was read with each; rows of the embedding come back
    return decoder


def _kept(
    config: ModelConfig, folder: TensorSource, device: torch.device, *, max_len: int | None, speed: Speed
) -> LayeredTarget | None:
    """A quantised folder whose matrices are kept; None if it is not quantised, or the device has no product for it."""
    config = config if max_len is None else replace(config, max_len=max_len)
    if device.type == "cpu":
        return stored_decoder(config, folder, speed) if speed.fast else None
    weights = packed_weights(config, folder, device, rounds_inputs=speed.rounds_inputs) if speed.fast else None
    return None if weights is None else _of_weights(config, weights, speed)


def _decoder(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None,
    speed: Speed,
    ids: Tensor | None = None,
) -> Target:
    if max_len is not None:
        config = replace(config, max_len=max_len)
    weights = read_weights(source, config, dtype=dtype, device=device)
    if ids is not None:
        few, rows = replace(config, vocab_size=len(ids)), replace(weights, head=weights.head[ids.to(device)].contiguous())
        return ReducedDraft(_of_weights(few, rows, replace(speed, fast=device.type == "cpu")), ids, config.vocab_size)
    return _of_weights(config, weights, speed)


def _of_weights(config: ModelConfig, weights: Weights, speed: Speed) -> LayeredTarget:
    on_gpu, device = None, weights.embedding.device
    if speed.fast and speed.rounds_inputs:
        on_gpu = float8_decoder(config, weights, numerics=speed.numerics, page_len=speed.page_len)
    elif speed.fast:
        on_gpu = gpu_decoder(config, weights, numerics=speed.numerics, bits=speed.bits, page_len=speed.page_len)
    if on_gpu is not None:
        return on_gpu
    if (speed.bits == 4 or speed.rounds_inputs) and device.type == "cpu" and speed.fast:
        rounded = rounded_decoder(config, weights, speed.bits, page_len=speed.page_len)
        if rounded is not None:
            return rounded
    refuse(replace(speed, numerics="auto", bits=16 if speed.bits == 8 and device.type == "cpu" else speed.bits))
    if speed.fast:
        decoder = fastest_decoder(config, weights, speed.bits, page_len=speed.page_len)
    else:
        decoder = Decoder(config, weights, speed.page_len, bits=speed.bits)
    refuse(Speed(speed.fast, "auto" if decoder.traits.is_invariant else speed.numerics, 16, 0))
    return decoder


def decoder_of(
    config: ModelConfig, weights: Weights, *, dtype: str | None, kv_cache: str, **running: Unpack[Running]
) -> LayeredTarget:
    """The decoder that ``load_model`` would choose, for weights in memory."""
    return stored_in(_of_weights(config, weights, _speed(dtype, **running)), storage_named(kv_cache))


def _speed(dtype: str | None, *, fast: bool = True, numerics: str = "auto", page_len: int = 0) -> Speed:
    check_numerics(numerics)
    if page_len < 0 or page_len & (page_len - 1):
        raise OptionError(f"page_len = {page_len} is not valid; use a power of two, or 0 to leave it to the device")
    return Speed(fast, numerics, FEW_BITS.get(dtype or "", 16), page_len, dtype == ROUNDED_INPUTS, dtype == EXACT)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a model folder; give the folder that holds the weights")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a JSON object ({error}); fetch the file again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object but a {type(raw).__name__}; fetch the file again")
    return raw


def device_of(name: str | None) -> torch.device:
    """A device by name. Default: the first GPU, or the CPU."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"unknown device {name!r}; {nearest(name, ['auto', 'cpu', 'cuda', 'cuda:0', 'mps'])}") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise OptionError(f"device {name!r} is not available ({torch.cuda.device_count()} CUDA devices found); use cpu")
    if device.type == "mps":
        check_mps()
    return device
