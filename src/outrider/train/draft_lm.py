"""A draft model that can learn: a plain Llama whose parameters carry the names of its checkpoint.

The lean decoder runs frozen weights; this is the same model as modules, for packed texts. The trained draft is saved as an
ordinary model folder, with its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.checkpoint import write_checkpoint
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.gpu import gpu_decoder
from outrider.models.heads import PackedTexts
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.head import HeadNorm
from outrider.models.heads.layer import HeadLayer, PackedAttending, Rotations
from outrider.models.load import read_config
from outrider.models.native import fastest_decoder
from outrider.models.source import local_path
from outrider.models.taught_model import Student
from outrider.models.weights import SafetensorsFolder, TensorDict, Weights, read_weights

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HeadLayer(config, num_norms=1) for _ in range(config.num_layers))
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)


@final
class DraftLM(Student):
    """Hidden states of packed texts, and their logits."""

    def __init__(self, config: ModelConfig, raw: dict[str, Any], origin: Path) -> None:
        super().__init__()
        self.config, self.raw, self.origin = config, raw, origin
        self.model = _Body(config)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotations = Rotations(config)
        self.recompute = False
        """Gradient checkpointing: keep only the layers' inputs, and run the layers again in the backward pass."""

    @staticmethod
    def load(name: str, device: torch.device) -> DraftLM:
        """Load a model folder of the Llama family."""
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

    @staticmethod
    def fresh(target: str, changes: Mapping[str, Any], device: torch.device, *, seed: int = 0) -> DraftLM:
        """An untrained draft with the vocabulary of the target in a folder. ``changes`` override entries of the target's
        ``config.json``. If the width is the same, it starts with the target's embedding."""
        path = local_path(target)
        if path.suffix == ".gguf":
            raise ModelError(f"{target} has no tokenizer files for a draft to share; give the target's model folder")
        known, ends = read_target(target)
        raw = {**known, **_LLAMA, "num_hidden_layers": 1, **changes}
        if "hidden_size" in changes and "head_dim" not in changes:
            raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
        config = config_of(raw)
        assert config is not None
        torch.manual_seed(seed)
        module = DraftLM(config, raw, path)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                closing = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if closing else 0.02)
        if config.hidden_size == ends.embedding.shape[1]:
            module.model.embed_tokens.weight.data.copy_(ends.embedding)
        return module.to(device)

    def forward(self, batch: PackedTexts) -> Tensor:
        """[R, L, H] states after the final norm."""
        *_, last = self.climb(batch)
        return self.model.norm(last)

    def climb(self, batch: PackedTexts, kept: Sequence[Tensor] | None = None) -> Iterator[Tensor]:
        """[R, L, H] states after every layer, before the final norm. ``kept[l]`` [R] is 0 for rows that skip layer l."""
        x = self.model.embed_tokens(batch.tokens)
        for index, layer in enumerate(self.model.layers):
            after = self._again(layer, x, batch) if self.recompute and self.training else self._layer(layer, x, batch)
            x = after if kept is None else x + kept[index][:, None, None].to(x.dtype) * (after - x)
            yield x

    def _layer(self, layer: nn.Module, x: Tensor, batch: PackedTexts) -> Tensor:
        return layer(x, PackedAttending(batch, self._rotations, self.config))

    def _again(self, layer: nn.Module, x: Tensor, batch: PackedTexts) -> Tensor:
        """A layer whose activations are recomputed in the backward pass instead of kept."""
        return cast("Tensor", checkpoint(self._layer, layer, x, batch, use_reentrant=False))

    @property
    def readout(self) -> Tensor:
        """[V, H] output matrix."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.readout.to(states.dtype))

    def frozen(self) -> Decoder:
        """The current model, for generating during training."""
        return Decoder(self.config, self._weights(torch.float32))

    def served(self, dtype: torch.dtype) -> Target:
        """The current model for drafting, as fast as one loaded from a folder."""
        weights = self._weights(dtype)
        return gpu_decoder(self.config, weights, numerics="fast") or fastest_decoder(self.config, weights)

    def _weights(self, dtype: torch.dtype) -> Weights:
        """A copy of the weights."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        return read_weights(TensorDict(tensors), self.config, dtype=dtype, device=self.model.norm.weight.device)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write a model folder, complete or not at all."""
        state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        files = (file for file in self.origin.glob("*") if file.is_file() and "index" not in file.name)
        beside = [file for file in files if file.suffix in (".json", ".jinja", ".model")]
        write_checkpoint(folder, state, config={**self.raw, "dtype": "bfloat16"}, notes=notes, beside=beside)


def _is_plain(config: ModelConfig) -> bool:
    switches = (config.qk_norm, config.post_norms, config.mlp_bias, config.norm_offset, config.parallel)
    extras = any(switches) or config.experts is not None or config.latent is not None
    multipliers = {config.embedding_scale, config.residual_scale, config.logit_scale}
    return config.activation == "silu" and config.norm_kind == "rms" and not extras and multipliers == {1.0}
