"""One rank's part of a model whose matrices stay as they are stored (``dtype="stored"``), on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.core.errors import OptionError
from outrider.models.decoder_weights import Weights
from outrider.models.features import ModelConfig
from outrider.models.gguf import GGUFFile, read_gguf
from outrider.models.gguf.stored import EMBEDDING, SPAN, stored_tensors
from outrider.models.load import read_config
from outrider.models.native.known import multiplies_stored
from outrider.models.quantised.folder import QuantisedFolder, checkpoint
from outrider.models.quantised.stored import StoredFolder
from outrider.models.share import Share
from outrider.models.stored_rows import block_len
from outrider.models.weights import read_weights

_DIVIDED = ("attn_output", "ffn_down", "ffn_down_exps")
"""Matrices of a GGUF file whose inputs are divided."""


def stored_share(path: Path, config: ModelConfig, share: Share) -> Weights:
    """A rank's weights of a GGUF file or a quantised folder. Its rows of the embedding are floats, since they are summed over
    ranks."""
    if path.suffix == ".gguf":
        file = memory = read_gguf(str(path))
        source, embedding = stored_tensors(file), file.tensor(EMBEDDING)
    else:
        folder = checkpoint(path, read_config(path))
        assert isinstance(folder, QuantisedFolder), "check_stored has seen it"
        source = StoredFolder(folder)
        memory, name = source.memory, next(name for name in folder.names if name.endswith("embed_tokens.weight"))
        embedding = folder.take(name, config.vocab_size, config.hidden_size)
    weights = read_weights(source, config, dtype=torch.float32, device=torch.device("cpu"), share=share)
    return replace(weights, embedding=share.rows(embedding).float(), file=memory)


def check_stored(path: Path, config: ModelConfig, size: int, *, is_cpu: bool) -> None:
    """Refuse a model whose matrices are not kept here, and one whose blocks would be cut."""
    what = f"dtype = 'stored' is not available with tensor_parallel = {size} for {path}"
    if not is_cpu or not multiplies_stored(config):
        raise OptionError(f"{what}: stored matrices are divided on a CPU, where the native pass has them whole; use 'bfloat16'")
    block, experts = _longest_block(path), config.experts
    if block is None:
        raise OptionError(f"{what}: its matrices are not stored in blocks; use 'auto', or 'w8a8' for weights of 8 bits")
    widths = {"heads": config.num_heads * config.head_dim}
    if experts is None or not all(experts.layers):
        widths["MLP columns"] = config.mlp_size
    if experts is not None:
        widths["columns of experts"] = experts.size
    uneven = next((name for name, width in widths.items() if width % (block * size)), None)
    if uneven is not None:
        raise OptionError(f"{what}: its {uneven} do not come in blocks of {block} for every rank; use 'bfloat16'")


def _longest_block(path: Path) -> int | None:
    """Inputs of the longest block that is not to be cut; None if the checkpoint has none."""
    if path.suffix == ".gguf":
        return _longest_of(read_gguf(str(path)))
    folder = checkpoint(path, read_config(path))
    return SPAN if isinstance(folder, QuantisedFolder) and folder.form.stays else None


def _longest_of(file: GGUFFile) -> int:
    divided = (entry for name, entry in file.tensors.items() if name.split(".")[-2] in _DIVIDED)
    return max((block_len(entry.storage.name) for entry in divided), default=SPAN)
