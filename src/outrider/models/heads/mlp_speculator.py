"""MLP speculator: a stage per depth, each a projection of the state plus an embedding of its own for the token.

(Wertheimer et al. 2024, arXiv 2404.19124; IBM's Foundation Model Stack.)

    s_k = gelu(ln_k(P_k s_{k-1} + (ew / sw) E_k[x_{t+1+k}])),   s_{-1} = h_t,     q_k = softmax(W_k s_k)
    sw = 2^(-1 / 2n),  ew^2 = (1 - sw^2) d / 2                  d: width of the state, n: stages

h is the target's last state after its final norm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.kind import Exported, HeadKind, Raw, need_whole_vocabulary, only
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights
from outrider.models.heads.recurrent import RecurrentHead

_STAGE = re.compile(r"(\w+)\.(\d+)\.(\w+)")
_EPS = 1e-6


class ShiftedNorm(nn.Module):
    """Root-mean-square norm with a scale and a shift; the format fixes its epsilon."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _EPS) + self.bias.to(x.dtype)


@final
class MlpSpeculator(RecurrentHead):
    """A stage per depth, or one for all."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.num_depths is not None
        size, count = config.inner_size or config.hidden_size, config.num_depths
        own = 1 if config.tie_stages else count
        embeddings = [nn.Embedding(config.vocab_size, size) for _ in range(own)]
        inner = [nn.Linear(size, size, bias=False) for _ in range(max(0, min(own, count - 1)))]
        heads = [nn.Linear(size, config.draft_vocab_size, bias=False) for _ in range(own)]
        norms = [ShiftedNorm(size) for _ in range(own)]
        self.emb = nn.ModuleList(_each(embeddings, count))
        self.proj = nn.ModuleList([nn.Linear(config.hidden_size, size, bias=False), *_each(inner, count - 1)])
        self.head = nn.ModuleList(_each(heads, count))
        self.ln = nn.ModuleList(_each(norms, count))
        state_weight = 0.5 ** (0.5 / count)
        self._mix = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
        for module in (*self.emb, *self.proj, *self.head):
            assert isinstance(module, nn.Linear | nn.Embedding)
            nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(size))

    def adopt(self, ends: EmbeddingAndOutput, ids: Tensor) -> None:
        """Start output matrices and embeddings from the target's, the latter scaled as the mixture expects."""
        super().adopt(ends, ids)
        size = self.config.inner_size or self.config.hidden_size
        if size != self.config.hidden_size:
            return
        scaled = ends.embedding / ends.embedding.std().clamp(min=1e-6) / math.sqrt(size)
        for stage in range(len(self.emb)):
            self.emb[stage].weight.copy_(scaled)  # type: ignore[operator]
            self.head[stage].weight.copy_(ends.readout[ids])  # type: ignore[operator]

    def begin(self, features: Tensor) -> Tensor:
        states = self.target_norm(features)
        return F.rms_norm(states, states.shape[-1:], eps=_EPS) / math.sqrt(2) if self.config.scale_input else states

    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        x = self.proj[depth](states)
        return F.gelu(self.ln[depth](x + self.emb[depth](tokens).to(x.dtype) * self._mix))

    def native_levels(self) -> HeadWeights:
        levels = (
            LevelWeights(
                readout=Affine.of(head).weight,
                cell=Affine.of(proj),
                cell_norm=(norm.weight.data, norm.bias.data),
                embedding=embedding.weight.data,
            )
            for head, proj, norm, embedding in zip(self.head, self.proj, self.ln, self.emb, strict=True)
            if isinstance(norm, ShiftedNorm) and isinstance(embedding, nn.Embedding)
        )
        return HeadWeights(
            levels=tuple(levels), state_norm=self.target_norm.weight.data, moving="cell", keeps_state=False, from_state=True,
            activation="gelu", is_scaled=self.config.scale_input, cell_eps=_EPS, share=self._mix,
        )  # fmt: skip

    def readout(self, depth: int, state: Tensor) -> Tensor:
        return self.head[depth](state)


def _each(modules: list[nn.Module] | list[nn.Embedding] | list[nn.Linear] | list[ShiftedNorm], count: int) -> list[nn.Module]:
    """One module per stage. The last one is used for all further stages."""
    return [modules[min(stage, len(modules) - 1)] for stage in range(count)]


@final
class MlpSpeculatorKind(HeadKind[MlpSpeculator]):
    """Folders of MLP speculators."""

    name = "mlp-speculator"
    module = MlpSpeculator
    architectures = ("MLPSpeculatorPreTrainedModel",)
    model_type = "mlp_speculator"
    counted_by = "n_predict"
    training: ClassVar = {"num_heads": 4}
    spoken = ("head.",)
    formats = ("vllm",)
    served_by = "outrider, vLLM's V0 engine, IBM's text generation server (export vllm)"

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        found = super().new_keys(raw)
        count = found["n_predict"]
        found |= {"emb_dim": raw["hidden_size"], "inner_dim": raw.get("inner_dim") or raw["hidden_size"]}
        found |= {"n_candidates": 5, "top_k_tokens_per_head": [max(1, 5 - depth) for depth in range(count)]}
        return found | {"tie_weights": raw.get("tie_weights", False), "scale_input": raw.get("scale_input", False)}

    def spread(self, state: Mapping[str, Tensor], wanted: Iterable[str], config: HeadConfig) -> dict[str, Tensor]:
        """Every stage of a tied speculator, from a file with the first one only (for projections: the first two)."""
        found = dict(state)
        for name in wanted if config.tie_stages else ():
            match = _STAGE.fullmatch(name)
            if name in found or match is None:
                continue
            part, _, tensor = match.groups()
            source = f"{part}.{1 if part == 'proj' else 0}.{tensor}"
            if source in found:
                found[name] = found[source]
        return found

    def export(self, head: MlpSpeculator, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        del form, target_name
        need_whole_vocabulary(head.config)
        keys = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "top_k_tokens_per_head", "n_candidates", "tie_weights")
        own = {key: head.config.raw[key] for key in (*keys, "scale_input") if key in head.config.raw}
        named = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
        return {**named, **own}, only(state, "emb.", "proj.", "head.", "ln.")


KIND = MlpSpeculatorKind()
