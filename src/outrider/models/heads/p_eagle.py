"""P-EAGLE: EAGLE-3's layers draft a whole block in one pass, with open positions for tokens that are not known yet.

The first place of the block is EAGLE-3's own column: three layers of the target and the token after them. Every further place
holds a mask token and one learned vector instead of features. It looks at the true columns and at the places of its own block
before it (Hui et al. 2026, arXiv 2602.01469; vLLM's parallel drafting). No guess is fed back, so all depths are computed
together. The guesses do not depend on each other, as EAGLE-3's do, but there is one pass instead of K.

    s_0(t) = layers(fc [h_a ; h_b ; h_c]_t, x_{t+1}),   s_k(t) = layers(fc m, mask) at place t + k,   q_k = softmax(W norm(s_k))

Lossless like all heads, which decide only how many guesses are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.heads import eagle3
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head, HeadNorm, PackedTexts
from outrider.models.heads.kind import Exported, HeadKind, Raw
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending, Rotations


@final
class ParallelEagle(Head):
    """EAGLE-3 with open positions."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        width = (len(config.taps) or 3) * config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        norms = [2, *[1] * (config.num_layers - 1)]
        self.layers = nn.ModuleList(HeadLayer(config.layer, num_norms=count) for count in norms)
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotations = Rotations(config.layer)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] the target's states, as input of the first layer."""
        return self.fc(features)

    def step(self, tokens: Tensor, states: Tensor, attending: Sequence[Attending]) -> Tensor:
        """[B, N, H] states after ``tokens``, through all layers, each with its own attention."""
        embedded = self.embed_tokens(tokens).to(states.dtype)
        for index, layer in enumerate(self.layers):
            states = layer(states, attending[index], embedded) if index == 0 else layer(states, attending[index])
        return states

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        attending = [PackedAttending(batch, self.rotations, self.config.layer) for _ in self.layers]
        open_places = torch.full_like(batch.tokens, self.config.mask_token)
        for depth in range(min(count, self.config.num_depths or count)):
            tokens = open_places if depth else batch.shifted(batch.tokens, 1)
            features = self.mask_hidden.to(batch.features.dtype).expand_as(batch.features) if depth else batch.features
            yield self.step(tokens, self.fuse(features), attending)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.norm(state))


@final
class PEagleKind(HeadKind[ParallelEagle]):
    """Folders of P-EAGLE heads: EAGLE-3's with more layers and the contents of open positions."""

    name = "p-eagle"
    module = ParallelEagle
    architectures = ("PEagleDraftModel", "PEagleSpeculator")
    model_type = "llama"
    counted_by = "num_heads"
    has_layer = True
    num_taps = 3
    is_stack = True
    training: ClassVar = {"num_heads": 5, "num_depths": 5, "num_layers": 2}
    formats = ("vllm",)
    served_by = "outrider, vLLM with parallel drafting (export vllm)"

    def claims(self, raw: Raw) -> bool:
        names = set(raw.get("architectures") or ())
        return super().claims(raw) or bool(names & set(eagle3.KIND.architectures) and eagle3.PARALLEL_TOKENS & set(raw))

    def num_depths(self, raw: Raw) -> int | None:
        """Public folders draft blocks of any length."""
        return super().num_depths(raw) if raw.get("outrider") else None

    def tensor_name(self, name: str) -> str:
        return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name

    def export(self, head: ParallelEagle, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        del form, target_name
        mask = head.config.mask_token
        tokens: dict[str, Any] = {"mask_token_id": mask, "ptd_token_id": mask, "pard_token": mask}
        keys = eagle3.vllm_keys(head, self.default_taps(head.config.target_layers))
        state["t2d"] = eagle3.known_tokens(head)
        return {**keys, "num_hidden_layers": head.config.num_layers, **tokens}, state


KIND = PEagleKind()
