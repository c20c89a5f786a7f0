"""Parallel multi-token prediction: a decoder layer per depth, each of which continues the target's last state by itself.

The layers do not see each other's tokens, and share an output matrix. The target is not trained. (Gloeckle et al. 2024, arXiv
2404.19737.)

    s_k(t) = layer_k(h_L)(t),      q_k = softmax(W norm(s_k))

h_L is the last layer's output, before the target's final norm. Layer k looks at places up to t.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending, Rotations


@final
class ParallelMtp(Head):
    """Layers beside each other."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None and config.num_depths is not None
        self.layers = nn.ModuleList(HeadLayer(config.layer, num_norms=1) for _ in range(config.num_depths))
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotations = Rotations(config.layer)

    def adopt(self, ends: EmbeddingAndOutput, ids: Tensor) -> None:
        super().adopt(ends, ids)
        self.norm.weight.copy_(ends.norm)

    def state(self, depth: int, features: Tensor, attending: Attending) -> Tensor:
        """[B, N, H] the output of a depth's layer for the target's states."""
        return self.layers[depth](features, attending)

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        for depth in range(min(count, len(self.layers))):
            yield self.state(depth, batch.features, PackedAttending(batch, self.rotations, self.config.layer))

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.norm(state))


@final
class ParallelMtpKind(HeadKind[ParallelMtp]):
    """Folders of parallel multi-token prediction."""

    name = "mtp-parallel"
    module = ParallelMtp
    architectures = ("ParallelMtpModel",)
    model_type = "mtp_parallel"
    counted_by = "num_heads"
    has_layer = True
    training: ClassVar = {"num_heads": 4}


KIND = ParallelMtpKind()
