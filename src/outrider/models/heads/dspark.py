"""DSpark: DFlash's block, with a small head that makes each token depend on the one before, and a confidence head.

The backbone (``block_head.py``) computes the states of all places in one pass. Tokens are then chosen from left to right, with
a low-rank bias that depends on the token before. A confidence head predicts, before a token is chosen, whether it will be
accepted. (DeepSeek-AI 2026, arXiv 2607.05147.)

    h_k(t) = norm(b_k(t)),     q_k(t) = softmax(W_target h_k + W2 m_k),     m_k from x_{t+1+k} and h_k      (markov.py)
    c_k(t) = sigmoid(w [h_k ; W1[x_{t+1+k}]])  ~  1 - TV(p, q_k)

Drafts start at the block's first position, which holds the newest token. ``sample_from_anchor`` = false is DFlash's layout, in
which that position predicts nothing. Lossless like all heads, which decide only how many guesses are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.heads.block_head import BlockHead, exported_keys
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import PackedTexts
from outrider.models.heads.kind import Exported, HeadKind, Raw
from outrider.models.heads.layer_numbers import as_outputs, from_outputs
from outrider.models.heads.markov import ConfidenceHead, MarkovHead

_RANK = 256
"""Rank of the public checkpoints."""


@final
class DsparkHead(BlockHead):
    """A head that chooses the tokens of its positions one after the other. A state is [h ; m ; W1[x]]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        raw, size = config.raw, config.hidden_size
        self.skipped = 0 if raw.get("sample_from_anchor", True) else 1
        """Positions at the start of a block that predict nothing."""
        self.markov_head = MarkovHead(
            str(raw.get("markov_head_type", "vanilla")),
            hidden_size=size,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            rank=int(raw.get("markov_rank", _RANK)),
        )
        self._sees_token = bool(raw.get("confidence_head_with_markov", True))
        knows = bool(raw.get("enable_confidence_head", True))
        width = size + (self.markov_head.rank if self._sees_token else 0)
        self.confidence_head = ConfidenceHead(width) if knows else None

    @property
    def num_places(self) -> int:
        return self.skipped + (self.config.num_depths or 4)

    def memory(self, like: Tensor) -> Tensor:
        """[..., r] initial memory of the Markov head."""
        return like.new_zeros(*like.shape[:-1], self.markov_head.rank)

    def follow(self, normed: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H + 2r] the state of a position after ``tokens``, and the new memory. ``normed`` is its state in the block."""
        embedded = self.markov_head.embed(tokens, normed.dtype)
        mixed, memory = self.markov_head.mix(normed, embedded, memory)
        return torch.cat([normed, mixed, embedded], -1), memory

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        places = self.blocks(batch)[self.skipped :]
        memory = self.memory(places[0])
        for depth, place in enumerate(places[:count]):
            state, memory = self.follow(self.norm(place), batch.shifted(batch.tokens, depth + 1), memory)
            yield state

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.read_off(self._parts(state)[0]) + self.bias(state)

    def bias(self, state: Tensor) -> Tensor:
        """[..., Vd] the Markov head's part of the logits."""
        return self.markov_head.markov_w2(self._parts(state)[1])

    def confidence(self, state: Tensor) -> Tensor:
        assert self.confidence_head is not None, "heads without a confidence head are not asked"
        normed, _, embedded = self._parts(state)
        return self.confidence_head(torch.cat([normed, embedded], -1) if self._sees_token else normed)

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank = self.markov_head.rank
        normed, mixed, embedded = state.split([self.config.hidden_size, rank, rank], -1)
        return normed, mixed, embedded


@final
class DsparkKind(HeadKind[DsparkHead]):
    """Folders of DSpark heads. A public block size counts the filled positions; layers are numbered by their outputs."""

    name = "dspark"
    module = DsparkHead
    architectures = ("DsparkModel", "Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
    model_type = "dspark"
    counted_by = "num_heads"
    has_layer = True
    layer_type = "qwen3"
    num_taps = 3
    is_stack = True
    training: ClassVar = {
        "num_heads": 5, "num_depths": 5, "num_layers": 2, "markov_rank": 64,
        "decay": 0.78, "loss": "l1-kl", "confidence_weight": 1.0,
    }  # fmt: skip
    spoken = ("lm_head.", "markov_head.markov_w2.")
    formats = ("vllm", "deepspec")
    served_by = "outrider, vLLM and SGLang (export vllm), TensorRT-LLM (export deepspec)"

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        named = {"markov_rank": raw.get("markov_rank", _RANK), "markov_head_type": raw.get("markov_head_type", "vanilla")}
        return {**super().new_keys(raw), **named, "enable_confidence_head": True, "confidence_head_with_markov": True}

    def read_keys(self, raw: Raw) -> Raw:
        """Our keys. The plain format numbers layers by their outputs, the speculators package by their inputs."""
        if "block_size" not in raw:
            return raw
        raw = {**(raw.get("dflash_config") or {}), **raw}
        taps = from_outputs(raw.get("target_layer_ids") or ()) or raw.get("aux_hidden_state_layer_ids")
        skipped = 0 if raw.get("sample_from_anchor", True) else 1
        return {**raw, "num_heads": int(raw["block_size"]) - skipped, "eagle_aux_hidden_state_layer_ids": taps}

    def export(self, head: DsparkHead, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Exports embedding and output matrix too, though they are the target's."""
        del target_name
        markov = head.markov_head.form
        if form == "vllm" and markov != "vanilla":
            raise OptionError(f"vLLM reads only the vanilla Markov head, and this one is {markov!r}; use format deepspec")
        whole = head.config.draft_vocab_size == head.config.vocab_size
        kept = {name: tensor for name, tensor in state.items() if name != "d2t" or not whole}
        if "lm_head.weight" not in kept:
            kept["lm_head.weight"] = kept["embed_tokens.weight"].clone()
        return _public_keys(head), kept


KIND = DsparkKind()


def _public_keys(head: DsparkHead) -> dict[str, Any]:
    config = head.config
    layers = {"mask_token_id": config.mask_token, "target_layer_ids": as_outputs(config.taps)}
    return {
        **exported_keys(head, "num_heads", "layer_type"),
        "architectures": ["Qwen3DSparkModel"],
        **layers,
        "dflash_config": layers,
        "markov_rank": head.markov_head.rank,
        "markov_head_type": head.markov_head.form,
        "enable_confidence_head": head.confidence_head is not None,
        "confidence_head_with_markov": bool(config.raw.get("confidence_head_with_markov", True)),
    }
