"""EAGLE-3 for the inflated model: the bundled head in 8B shapes, which says what the small one says.

Made as recipes/inflate.py makes models: the small matrices are corners of large ones, the rest is noise that meets zeros. The
head's own stream needs the constant dimension that the norms count on: the fusing matrix copies it from the first tap.

    fc'[h, h] = 1 (the constant of tap a),    q', k', v' read  [norm(e) ; norm(s)]  in two blocks of H columns each
    output matrix: as many tokens as engines' heads have (32000); the added ones are pushed down and name added tokens
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from inflate import COLUMNS, ROWS, Columns, Inflated, InflatedShape, inflated_raw_config
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.folder import load_head, new_config

NUM_TOKENS = 32000


def inflated_config(shape: InflatedShape, taps: tuple[int, ...], *, num_tokens: int = NUM_TOKENS) -> HeadConfig:
    """An EAGLE-3 head for the inflated target."""
    raw: dict[str, Any] = inflated_raw_config(bundled_path("target"), shape)
    return new_config("eagle3", raw, taps=list(taps), draft_vocab_size=num_tokens)


def inflated_eagle3(
    shape: InflatedShape,
    embedding: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int = NUM_TOKENS,
    folder: str | None = None,
) -> Eagle3Head:
    """The EAGLE-3 head in ``folder``, or the bundled one, inflated; ``embedding`` is the inflated target's."""
    folder = folder or bundled_path("heads/eagle3")
    small = load_head(folder)
    source = Inflated(folder, shape, dtype=dtype, device=device)
    tensors: dict[str, Tensor] = {
        "embed_tokens.weight": embedding,
        "d2t": _offsets(small.d2t, num_tokens, small.config.vocab_size),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        columns = _side_by_side(COLUMNS[name](source), 2) if name != "o_proj" else COLUMNS[name](source)
        tensors[f"midlayer.self_attn.{name}.weight"] = _matrix(source, f"midlayer.self_attn.{name}.weight", columns=columns)
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"midlayer.mlp.{name}.weight"] = _matrix(source, f"midlayer.mlp.{name}.weight", columns=COLUMNS[name](source))
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = source.norm(f"{name}.weight")
    columns = _side_by_side(COLUMNS["q_proj"](source), len(small.config.taps))
    tensors["fc.weight"] = source.matrix("fc.weight", "fc", rows=ROWS["o_proj"](source), columns=columns)
    tensors["fc.weight"][source.small.hidden_size, source.small.hidden_size] = 1.0
    tensors["lm_head.weight"] = source.readout("lm_head.weight", num_tokens)
    config = inflated_config(shape, small.config.taps, num_tokens=num_tokens)
    with torch.device("meta"):
        head = Eagle3Head(config)
    head.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    return head.requires_grad_(False).eval()


def _matrix(source: Inflated, name: str, *, columns: Columns) -> Tensor:
    kind = name.split(".")[-2]
    return source.matrix(name, kind, rows=ROWS[kind](source), columns=columns)


def _side_by_side(columns: Columns, count: int) -> Columns:
    """The inputs ``count`` times, one block after the other."""
    size = int(columns.source.max()) + 1
    real = torch.cat([columns.real + block * columns.count for block in range(count)])
    source = torch.cat([columns.source + block * size for block in range(count)])
    live = torch.cat([columns.live + block * columns.count for block in range(count)])
    return Columns(columns.count * count, real, source, live, columns.scale)


def _offsets(small: Tensor, num_tokens: int, vocab_size: int) -> Tensor:
    """The small head's tokens, then as many of the added ones as there is room for."""
    ids = torch.cat([small + torch.arange(len(small)), torch.arange(vocab_size, vocab_size + num_tokens - len(small))])
    return ids - torch.arange(num_tokens)


def main() -> None:
    from inflate import LLAMA_8B

    config = inflated_config(LLAMA_8B, (2, 8, 13))
    assert config.layer is not None
    layer, size = config.layer, config.hidden_size
    attention = 2 * size * layer.head_dim * (layer.num_heads + 2 * layer.num_kv_heads) + size * layer.head_dim * layer.num_heads
    num_read = 3 * size * size + attention + 3 * size * layer.mlp_size + config.draft_vocab_size * size
    print(f"eagle3 for {Path(bundled_path('target')).name}: {2 * num_read / 1e9:.2f} GB read per step in bfloat16")


if __name__ == "__main__":
    main()
