"""A draft model that can learn: a plain Llama whose parameters carry the names of its checkpoint.

The lean decoder runs frozen weights; this is the same model as modules, for packed texts. What was learned is written back
as an ordinary model folder, tokenizer included.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.gpu import gpu_decoder
from outrider.models.heads import Packed
from outrider.models.heads.folder import replace_file
from outrider.models.heads.head import Norm
from outrider.models.heads.layer import HeadLayer, PackedAttending, Rotations
from outrider.models.load import local_path, read_config
from outrider.models.native import fastest_decoder
from outrider.models.weights import SafetensorsFolder, TensorDict, Weights, read_weights


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HeadLayer(config, num_norms=1) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)


@final
class DraftLM(nn.Module):
    """Hidden states of packed texts, and logits of them."""

    def __init__(self, config: ModelConfig, raw: dict[str, Any], origin: Path) -> None:
        super().__init__()
        self.config, self.raw, self.origin = config, raw, origin
        self.model = _Body(config)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotations = Rotations(config)

    @staticmethod
    def load(name: str, device: torch.device) -> DraftLM:
        """From a model folder of the Llama family."""
        path = local_path(name)
        raw = read_config(path)
        config = config_of(raw)
        if config is None or not _is_plain(config):
            kind = raw.get("model_type")
            raise ModelError(
                f"{name}: only drafts of the plain Llama kind can be trained, and this is {kind!r}; use one of those"
            )
        module, source = DraftLM(config, raw, path), SafetensorsFolder(path)
        module.load_state_dict({key: source.take(key, *value.shape).float() for key, value in module.state_dict().items()})
        return module.to(device)

    def forward(self, batch: Packed) -> Tensor:
        """[R, L, H] after the final norm."""
        x = self.model.embed_tokens(batch.tokens)
        for layer in self.model.layers:
            x = layer(x, PackedAttending(batch, self._rotations, self.config))
        return self.model.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return nn.functional.linear(states, weight.to(states.dtype))

    def frozen(self) -> Decoder:
        """The model as it is now, to generate with while it is trained."""
        return Decoder(self.config, self._weights(torch.float32))

    def served(self, dtype: torch.dtype) -> Target:
        """The model as it is now, to draft with: as fast as a model that was loaded from a folder."""
        weights = self._weights(dtype)
        return gpu_decoder(self.config, weights, numerics="fast") or fastest_decoder(self.config, weights)

    def _weights(self, dtype: torch.dtype) -> Weights:
        """A copy."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        return read_weights(TensorDict(tensors), self.config, dtype=dtype, device=self.model.norm.weight.device)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """A model folder; written whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        try:
            replace_file(folder / "model.safetensors", lambda path: save_file(state, path, metadata={"format": "pt"}))
            for file in self.origin.glob("*"):
                if file.is_file() and file.suffix in (".json", ".jinja", ".model") and "index" not in file.name:
                    shutil.copyfile(file, folder / file.name)
            raw = {**self.raw, "dtype": "bfloat16"}
            replace_file(folder / "config.json", lambda path: path.write_text(json.dumps(raw, indent=2) + "\n"))
            replace_file(folder / "provenance.json", lambda path: path.write_text(json.dumps(notes, indent=2) + "\n"))
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{folder} cannot be written ({error}); the last checkpoint is whole: make room, then resume"
            ) from error


def _is_plain(config: ModelConfig) -> bool:
    extras = config.qk_norm or config.post_norms or config.mlp_bias or config.norm_offset or config.embedding_scale != 1
    return config.activation == "silu" and not extras
