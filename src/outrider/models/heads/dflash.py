"""DFlash: a block of open places is filled in one pass of a few layers that see the target's features and each other.

The block begins with the newest token; every further place holds a mask token and answers for the token *at* that place, as a
diffusion model with one denoising step does (Chen et al. 2026, arXiv 2602.06036). Places of a block look at each other in both
directions. What the target knows is injected into every layer: its features, fused and scaled once, become keys and values
there by the layer's own matrices, and never queries. Embedding and output matrix are the target's.

    c(j) = norm(fc [h_a ; h_b ; h_c]_j),      block of t:  b_0 = e(x_{t+1}),  b_k = e(mask)  at positions t + 1 + k
    layer:  Q from b,   K, V from [ c(j), j <= t ; b_0 .. b_K ],        q_{k-1}(t) = softmax(W_target norm(b_k))

P-EAGLE (``p_eagle.py``) reads true tokens with their features and lets open places see earlier ones only; here only
features are remembered. Lossless like all heads: what they say decides only how many guesses are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from outrider.core.errors import OptionError
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, Norm, PackedTexts
from outrider.models.heads.kind import Exported, HeadKind, Raw, plain_keys
from outrider.models.heads.layer import Attending, HeadLayer, Rotations, attend_beside, safe_sight
from outrider.models.heads.layer_numbers import as_outputs, from_outputs
from outrider.models.layers import rotate


@final
class DflashHead(Head):
    """Layers over a block."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear((len(config.taps) or 3) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(HeadLayer(config.layer, num_norms=1) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotations = Rotations(config.layer)

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*super().frozen, "lm_head.weight")

    @property
    def num_places(self) -> int:
        """Of a block: the newest token's, and the open ones."""
        return 1 + (self.config.num_depths or 4)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states as the layers remember them."""
        return self.hidden_norm(self.fc(features))

    def entries(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of fused states in every layer."""
        return [cast("HeadLayer", layer).self_attn.entries(context) for layer in self.layers]

    def block(self, tokens: Tensor, attending: Sequence[Attending], dtype: torch.dtype) -> Tensor:
        """[B, N, H] states of the places that hold ``tokens``, through all layers, each with its own attention."""
        states = self.embed_tokens(tokens).to(dtype)
        for layer, sees in zip(self.layers, attending, strict=True):
            states = layer(states, sees)
        return states

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        context = self.fuse(batch.features)
        attending = [PackedBlocks(self, batch, *entries) for entries in self.entries(context)]
        open_places = [torch.full_like(batch.tokens, self.config.mask_token)] * (self.num_places - 1)
        tokens = torch.cat([batch.shifted(batch.tokens, 1), *open_places], 1)
        places = self.block(tokens, attending, context.dtype).chunk(self.num_places, 1)
        yield from places[1 : 1 + count]

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        weight = self.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return nn.functional.linear(self.norm(state), weight.to(state.dtype))


@final
class PackedBlocks(Attending):
    """Blocks behind all places of packed texts at once, in one layer: [R, heads, P L, D], a block's places L apart."""

    def __init__(self, head: DflashHead, batch: PackedTexts, keys: Tensor, values: Tensor) -> None:
        """``keys`` and ``values`` of the target's features at every place."""
        assert head.config.layer is not None
        self._config, self._rotations, self._positions = head.config.layer, head.rotations, batch.positions
        self._num_places, self._sight = head.num_places, safe_sight(batch)
        keys = rotate(keys, self._rotations.at(batch.positions, keys.dtype))
        self._keys, self._values = self._per_query(keys), self._per_query(values)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        positions = torch.cat([self._positions + 1 + place for place in range(self._num_places)], 1)
        rotation = self._rotations.at(positions, queries.dtype)
        asked = (rotate(queries, rotation) * self._config.query_scale).chunk(self._num_places, 2)
        own_keys = self._per_query(rotate(keys, rotation)).chunk(self._num_places, 2)
        own_values = self._per_query(values).chunk(self._num_places, 2)
        all_keys, all_values = (self._keys, *own_keys), (self._values, *own_values)
        return torch.cat([attend_beside(query, all_keys, all_values, self._sight) for query in asked], 2)

    def _per_query(self, entries: Tensor) -> Tensor:
        return entries.repeat_interleave(self._config.num_heads // self._config.num_kv_heads, 1)


@final
class DflashKind(HeadKind[DflashHead]):
    """Folders of DFlash heads. Public ones say some things in other words: a block counts the newest token."""

    name = "dflash"
    module = DflashHead
    architectures = ("DflashModel", "DFlashDraftModel", "DFlashSpeculator")
    model_type = "dflash"
    counted_by = "num_heads"
    has_layer = True
    layer_type = "qwen3"
    num_taps = 3
    is_stack = True
    training: ClassVar = {"num_heads": 5, "num_depths": 5, "num_layers": 2, "decay": 0.78}
    formats = ("vllm",)
    served_by = "outrider, vLLM (export vllm)"

    def read_keys(self, raw: Raw) -> Raw:
        """The plain format counts layers by their outputs, that of the speculators package by what enters them."""
        if "block_size" not in raw:
            return raw
        nested: Raw = raw.get("dflash_config") or {}
        taps = from_outputs(nested.get("target_layer_ids") or ()) or raw.get("aux_hidden_state_layer_ids")
        mask = nested.get("mask_token_id", raw.get("mask_token_id"))
        ours = {"num_heads": int(raw["block_size"]) - 1, "eagle_aux_hidden_state_layer_ids": taps, "mask_token_id": mask}
        return {**raw, **ours}

    def export(self, head: DflashHead, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Embedding and output matrix are written though they are the target's."""
        del form, target_name
        kept = {name: tensor for name, tensor in state.items() if name != "d2t"}
        if head.config.tied:
            kept["lm_head.weight"] = kept["embed_tokens.weight"].clone()
        return _vllm_keys(head), kept


KIND = DflashKind()


def _vllm_keys(head: DflashHead) -> dict[str, Any]:
    config = head.config
    if 0 in config.taps:
        raise OptionError(f"dflash heads that read layers {list(config.taps)} have no vllm format; train with others than 0")
    assert config.layer is not None
    own = ("num_heads", "mask_token_id", "draft_vocab_size")
    return {
        **{key: value for key, value in plain_keys(head).items() if key not in own},
        "model_type": "qwen3",
        "head_dim": config.layer.head_dim,  # or theirs would be 128
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.target_layers,
        "block_size": head.num_places,
        "dflash_config": {"mask_token_id": config.mask_token, "target_layer_ids": as_outputs(config.taps)},
        "tie_word_embeddings": False,
    }
