"""The adapter of Kangaroo: one decoder layer between an early exit of the target and the target's own output matrix.

An exit in the middle of an ordinary target predicts badly. An adapter is a layer that is trained to turn the exit's states into
those of the last layer, at the cost of one layer per guess. (Liu et al. 2024, Kangaroo, arXiv 2404.18911; their layer has
attention and norms only, ours has the MLP too.) Before training it equals the bare exit, because what it adds is zero.

    q(t) = softmax(head(norm(layer(h_E)(t))))         h_E: states entering layer E; norm and head are the target's own
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.checkpoint import write_checkpoint
from outrider.models.config import config_of
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import signature_of
from outrider.models.heads.head import HeadNorm, PackedTexts
from outrider.models.heads.layer import HeadLayer, PackedAttending, Rotations
from outrider.models.load import read_config
from outrider.models.taught_model import Student
from outrider.models.weights import SafetensorsFolder

_KEYS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act rope_theta "
    "rope_scaling rope_parameters max_position_embeddings vocab_size"
).split()
_CLOSE = 0.98


@final
class Adapter(Student):
    """A layer that reads the states of an exit."""

    def __init__(self, raw: Mapping[str, Any], *, exit_layer: int, ends: EmbeddingAndOutput | None = None) -> None:
        """``raw`` describes the layer as a Llama config does. ``ends`` are needed for training only; a drafter uses the
        target's."""
        super().__init__()
        config = config_of({**raw, "model_type": "llama", "num_hidden_layers": 1})
        assert config is not None
        self.raw, self.config, self.exit_layer, self.taps = dict(raw), config, exit_layer, (exit_layer,)
        self.layer = HeadLayer(config, num_norms=1)
        for linear in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(linear.weight)
        self._rotations = Rotations(config)
        self._norm = HeadNorm(config.hidden_size, config.norm_eps).requires_grad_(False)
        self.register_buffer("_readout", None, persistent=False)
        if ends is not None:
            self._norm.weight.data.copy_(ends.norm)
            self._readout = ends.readout

    def forward(self, batch: PackedTexts) -> Tensor:
        return self.layer(batch.features, PackedAttending(batch, self._rotations, self.config))

    def logits(self, states: Tensor) -> Tensor:
        assert self._readout is not None, "an adapter that was loaded to draft speaks through the target"
        return F.linear(self._norm(states), self._readout.to(states.dtype))

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        state = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in self.layer.state_dict().items()}
        write_checkpoint(folder, state, config=self.raw, notes=notes)


def new_adapter(raw: Mapping[str, Any], ends: EmbeddingAndOutput, target: Target, *, exit_layer: int) -> Adapter:
    """An untrained adapter for the exit of a target with this ``config.json``."""
    if not 1 <= exit_layer < target.num_layers:
        raise ModelError(
            f"exit_layer = {exit_layer} is not valid; the target has {target.num_layers} layers, use 1 to one less"
        )
    signature = signature_of(target, int(raw["hidden_size"]))
    own = {"kind": "kangaroo", "exit_layer": exit_layer, "target_layers": target.num_layers, "signature": list(signature)}
    described = {**{key: raw[key] for key in _KEYS if key in raw}, "attention_bias": False, "outrider": own}
    return Adapter(described, exit_layer=exit_layer, ends=ends).to(target.device)


def load_adapter(folder: str, target: Target) -> Adapter:
    """The adapter in a folder, checked against the target and on its device: on a CPU in float32, else in its precision."""
    path = Path(folder)
    raw = read_config(path)
    own = raw.get("outrider") or {}
    if own.get("kind") != "kangaroo":
        raise ModelError(f"{folder} holds no Kangaroo adapter; train one: outrider train kangaroo")
    mine = torch.tensor(signature_of(target, int(raw["hidden_size"])))
    if own["target_layers"] != target.num_layers or float(mine @ torch.tensor(own["signature"])) < _CLOSE:
        raise ModelError(f"{folder} was trained for another target; use that one, or train one: outrider train kangaroo")
    adapter, source = Adapter(raw, exit_layer=int(own["exit_layer"])), SafetensorsFolder(path)
    state = {name: source.take(name, *tensor.shape) for name, tensor in adapter.layer.state_dict().items()}
    adapter.layer.load_state_dict(state)
    dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    return adapter.to(target.device, dtype).requires_grad_(False)
