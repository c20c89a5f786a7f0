"""L-MTP: heads that skip tokens. Head i guesses the token 1 + s (i + 1) places ahead, so few heads reach far.

The tokens between are those that the same heads predicted one place earlier. With stride 2, the last two states of the target
together cover every place ahead, and only the heads are computed (Liu et al. 2025, arXiv 2505.17505: "backward decoding").

    q_k(t) = softmax(W_i res_i(h_u)),      i = k div s,   u = t + 1 + (k mod s) - s       the token t + 2 + k, seen from place u

h is the target's last state after its final norm, zero before the first place; s = 1 is Medusa.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.heads.blocks import ResidualBlocks, new_readouts, readout_of
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights


@final
class LMtpHead(Head):
    """``num_depths / stride`` heads, rounded up, for ``num_depths`` positions ahead."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None
        self.target_norm = HeadNorm(config.hidden_size, config.norm_eps)
        count = -(-config.num_depths // config.stride)
        self.blocks = nn.ModuleList(ResidualBlocks(config.hidden_size, config.num_blocks) for _ in range(count))
        self.lm_heads = new_readouts(config, count)

    def back(self, depth: int) -> int:
        """The offset from the newest state to the one that predicts depth ``depth``."""
        return self.config.stride - 1 - depth % self.config.stride

    def state(self, depth: int, feature: Tensor) -> Tensor:
        """[..., H] the output of a depth's head for the target's state ``back(depth)`` positions ago."""
        return self.blocks[depth // self.config.stride](self.target_norm(feature))

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.num_depths is not None
        for depth in range(min(count, self.config.num_depths)):
            yield self.state(depth, _earlier(batch, self.back(depth)))

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return readout_of(self.lm_heads, depth // self.config.stride)(state)

    def native_levels(self) -> HeadWeights:
        assert self.config.num_depths is not None
        stride = self.config.stride
        levels = (
            LevelWeights(
                readout=Affine.of(readout_of(self.lm_heads, depth // self.config.stride)).weight,
                blocks=ResidualBlocks.of(self.blocks[depth // stride]).native_weights(),
                place=stride - 1 - self.back(depth),
            )
            for depth in range(self.config.num_depths)
        )
        return HeadWeights(levels=tuple(levels), state_norm=self.target_norm.weight.data)


def _earlier(batch: PackedTexts, count: int) -> Tensor:
    """[R, L, F] the features ``count`` positions before; zero before the beginning of the text."""
    if count == 0:
        return batch.features
    moved = torch.cat([torch.zeros_like(batch.features[:, :count]), batch.features[:, :-count]], 1)
    return moved * (batch.positions >= count)[..., None].to(moved.dtype)


@final
class LMtpKind(HeadKind[LMtpHead]):
    """Folders of L-MTP heads."""

    name = "l-mtp"
    module = LMtpHead
    architectures = ("LeapMtpModel",)
    model_type = "l_mtp"
    counted_by = "num_heads"
    training: ClassVar = {"num_heads": 4, "stride": 2}


KIND = LMtpKind()
