"""Medusa: one small head per depth, all reading the target's last state.

The heads do not see each other's guesses: head k maps the last hidden state to the token k + 2 places on. (Cai et al. 2024,
arXiv 2401.10774.)

    q_k = softmax(W_k res(h_t)),      res(x) = x + silu(A x + a), several times

h is the target's last state after its final norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, final

from torch import Tensor, nn

from outrider.models.heads.blocks import ResidualBlocks, new_readouts, readout_of
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import Exported, HeadKind, only
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights

_FIRST_RELEASE = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)(\.linear)?\.(weight|bias)")
"""``{head}.{layer}.linear.weight`` of a block and ``{head}.{last}.weight`` of an output matrix."""


@final
class MedusaHead(Head):
    """Independent heads."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(ResidualBlocks(config.hidden_size, config.num_blocks) for _ in range(config.num_depths))
        self.lm_heads = new_readouts(config, config.num_depths)

    def state(self, depth: int, feature: Tensor) -> Tensor:
        """[..., H] the output of head ``depth`` for the target's last state."""
        return self.blocks[depth](self.target_norm(feature))

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        for depth in range(min(count, len(self.blocks))):
            yield self.state(depth, batch.features)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return readout_of(self.lm_heads, depth)(state)

    def native_levels(self) -> HeadWeights:
        levels = (
            LevelWeights(readout=Affine.of(readout_of(self.lm_heads, depth)).weight, blocks=blocks.native_weights())
            for depth, blocks in enumerate(map(ResidualBlocks.of, self.blocks))
        )
        return HeadWeights(levels=tuple(levels), state_norm=self.target_norm.weight.data)


@final
class MedusaKind(HeadKind[MedusaHead]):
    """Folders of Medusa heads."""

    name = "medusa"
    module = MedusaHead
    architectures = ("MedusaModel",)
    model_type = "medusa"
    counted_by = "num_heads"
    training: ClassVar = {"num_heads": 4}
    formats = ("vllm",)
    served_by = "outrider, vLLM (export vllm)"

    def tensor_name(self, name: str) -> str:
        match = _FIRST_RELEASE.fullmatch(name)
        if match is None:
            return name
        head, layer, linear, part = match.groups()
        return f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"

    def export(self, head: MedusaHead, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Exports for vLLM. No other key may hold both "num" and "heads" or "layers", because vLLM would take it for one
        of these."""
        del form, target_name
        config = head.config
        keys = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_depths,
            "num_hidden_layers": config.num_blocks,
            "medusa_fc_bias": True,
            "original_lm_head": False,
            "max_paths": 64,
            "topk": 10,
            "truncated_vocab_size": config.vocab_size,
        }
        return keys, only(state, "blocks.", "lm_heads.")


KIND = MedusaKind()
