"""gpt-oss checkpoints with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.quantised.mxfp4 import MXFP4


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Give a gpt-oss checkpoint experts of any e2m1 floats; returns the tensors that it would have unquantised."""
    path = folder / "model.safetensors"
    whole, stored, draw = load_file(path), dict[str, Tensor](), torch.Generator().manual_seed(0)
    for name in list(whole):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = whole[name]
            continue
        count, inputs, outputs = whole[name].shape
        shape = (count, outputs, inputs // 32)
        parts = {
            "_blocks": torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8),
            "_scales": torch.randint(122, 126, shape, generator=draw, dtype=torch.uint8),
        }
        stored |= {name + ending: part for ending, part in parts.items()}
        whole[name] = MXFP4().dequantised(parts)
    save_file(stored, path, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(raw))
    return whole
