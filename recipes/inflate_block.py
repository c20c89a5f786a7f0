"""DFlash and DSpark for the inflated model: trained heads in 8B shapes, which say what the small ones say.

Made as recipes/inflate_head.py makes EAGLE-3. Their layers scale every query and key head by itself, over D numbers instead of
d of which D - d are zero:

    q', k' = norm over D  =  sqrt(D / d) (norm over d)          so that  w_q' = w_q,   w_k' = w_k sqrt(d / D)
    W1', W2'  rows of added tokens are noise: the output matrix pushes those tokens down anyway

Exact in real arithmetic but for the eps of these norms, which is far below what they scale.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from inflate import COLUMNS, ROWS, Inflated, InflatedShape, Rows, inflated_raw_config
from inflate_head import _side_by_side
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.models.heads.block_head import BlockHead
from outrider.models.heads.folder import load_head, module_of, new_config

KEPT = ("mask_token_id", "num_heads", "markov_rank", "markov_head_type")


def inflated_block(
    folder: str, shape: InflatedShape, ends: tuple[Tensor, Tensor], *, dtype: torch.dtype, device: torch.device
) -> BlockHead:
    """The DFlash or DSpark heads in ``folder``, inflated; ``ends`` are the inflated target's embedding and output matrix."""
    small = load_head(folder)
    assert isinstance(small, BlockHead)
    source = Inflated(folder, shape, dtype=dtype, device=device)
    raw: dict[str, Any] = inflated_raw_config(bundled_path("target"), shape)
    keys = {key: value for key, value in small.config.raw.items() if key in KEPT}
    config = new_config(small.config.kind, raw, taps=list(small.config.taps), num_layers=small.config.num_layers, **keys)
    with torch.device("meta"):
        head = module_of(config)
    tensors = {"embed_tokens.weight": ends[0], "lm_head.weight": ends[1], "d2t": torch.zeros(shape.vocab).long()}
    tensors |= {name: _tensor(source, name, small.state_dict()[name]) for name in head.state_dict() if name not in tensors}
    head.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    assert isinstance(head, BlockHead)
    return head.requires_grad_(False).eval()


def _tensor(source: Inflated, name: str, small: Tensor) -> Tensor:
    """One tensor of the large head."""
    kind, size, big = name.split(".")[-2], source.small.hidden_size, source.shape
    if kind in ("q_norm", "k_norm"):
        weight = 1 + source.noise(big.head_dim)
        share = 1.0 if kind == "q_norm" else math.sqrt(source.small.head_dim / big.head_dim)
        weight[source.rotated_dims()] = (small * share).to(weight)
        return weight
    if kind.endswith("norm"):
        return source.norm(name)
    if kind == "fc":
        columns = _side_by_side(COLUMNS["q_proj"](source), small.shape[1] // size)
        matrix = source.matrix(name, kind, rows=ROWS["o_proj"](source), columns=columns)
        matrix[size, size] = 1.0  # the constant of the first tap
        return matrix
    if kind in ("markov_w1", "markov_w2"):
        matrix = source.noise(big.vocab, small.shape[1])
        matrix[: len(small)] = small.to(matrix)
        return matrix
    if name == "confidence_head.proj.weight":
        matrix = torch.zeros(1, small.shape[1] - size + big.hidden, dtype=torch.float32)
        matrix[:, :size], matrix[:, big.hidden :] = small[:, :size], small[:, size:]
        return matrix.to(source.noise(1).dtype)
    if kind not in ROWS:
        return small.to(source.noise(1).dtype)  # the confidence head's bias
    rows = _alone(source) if kind == "q_proj" else ROWS[kind](source)
    return source.matrix(name, kind, rows=rows, columns=COLUMNS[kind](source))


def _alone(source: Inflated) -> Rows:
    """Query rows; a real head is zero where the small one had nothing, because each head is scaled by its length."""
    rows, heads = ROWS["q_proj"](source), len(source.query_heads()[0])
    free = torch.ones(heads * source.shape.head_dim, dtype=torch.bool)
    free[rows.real] = False
    return replace(rows, zero=free.nonzero()[:, 0])
