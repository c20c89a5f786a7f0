"""The speculators package's part of ``check_speculators.py``: sees nothing of ours but the files in the folder it is given."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore[reportMissingImports]

folder = Path(sys.argv[1])
case = load_file(folder / "case.safetensors")
expected, size = case["logits"], case["tokens"].shape[1]
config = SpeculatorModelConfig.from_pretrained(folder / "exported")
config.transformer_layer_config._attn_implementation = "eager"
model = SpeculatorModel.from_pretrained(folder / "exported", config=config, torch_dtype=torch.float32).eval()
seen: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].detach().float()))
with torch.no_grad():
    model(
        hidden_states=case["features"].float(),
        input_ids=case["tokens"],
        document_ids=torch.zeros(1, size, dtype=torch.long),
        position_ids=torch.arange(size)[None],
        ttt_steps=len(expected),
    )
agree, distance, places = [], [], size - 1 - len(expected)
for depth, logits in enumerate(seen):
    mine, theirs = expected[depth, 0, :places], logits[0, :places]
    agree.append(float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()))
    distance.append(float((mine - theirs).abs().max()))
found = {"version": version("speculators"), "class": type(model).__name__, "places": places}
print(json.dumps({**found, "agree": agree, "distance": distance}))
