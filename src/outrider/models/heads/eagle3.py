"""EAGLE-3: a decoder layer on the states of three target layers, which keeps its own states and has its own output matrix.

It does not imitate the target's features, so it can be trained on its own drafts; its matrix is often over the commonest tokens
only. (Li et al. 2025, arXiv 2503.01840.)

    s_k = layer([n1(e(x_{t+1+k})) ; n2(s_{k-1})]),      s_{-1} = fc [h_a ; h_b ; h_c]_t,      q_k = softmax(W norm(s_k))
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.decoder_weights import Weights
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.head import Head, HeadNorm
from outrider.models.heads.kind import Exported, GgufLayout, HeadKind, Raw, plain_keys
from outrider.models.heads.layer import Attending, HeadLayer
from outrider.models.heads.layer_numbers import both_spellings

PARALLEL_TOKENS = frozenset({"pard_token", "ptd_token_id"})
"""Keys by which vLLM recognises P-EAGLE, whose architecture has the same name."""


@final
class Eagle3Head(EagleHead):
    """Predicts states of its own instead of the target's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear((len(config.taps) or 3) * config.hidden_size, config.hidden_size, bias=False)
        assert config.layer is not None
        self.midlayer = HeadLayer(config.layer, num_norms=2)
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        embedded = self.embed_tokens(tokens).to(states.dtype)
        return self.midlayer(states, attending, embedded)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.norm(state))

    def native_weights(self) -> Weights | None:
        layer = self.midlayer.native_weights()
        if layer is None:
            return None
        return Weights(self.embed_tokens.weight.data, [layer], self.norm.weight.data, self.lm_head.weight.data)


@final
class Eagle3Kind(HeadKind[Eagle3Head]):
    """Folders of EAGLE-3 heads."""

    name = "eagle3"
    module = Eagle3Head
    architectures = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")
    model_type = "llama"
    has_layer = True
    num_taps = 3
    training: ClassVar = {"num_depths": 5}
    formats = ("vllm", "sglang", "speculators")
    gguf = GgufLayout(
        "eagle3",
        {"norm_before_residual": lambda _: False, "norm_before_fc": lambda _: False},
        pairs_adjacent=True,
        num_taps=3,
    )
    served_by = "outrider, vLLM, SGLang (export vllm), speculators (export speculators), llama.cpp (export gguf)"

    def claims(self, raw: Raw) -> bool:
        return super().claims(raw) and not PARALLEL_TOKENS & set(raw)

    def tensor_name(self, name: str) -> str:
        return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def export(self, head: Eagle3Head, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        state["t2d"] = known_tokens(head)
        if form == "speculators":
            renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
            return _speculators_keys(head, target_name), renamed
        return vllm_keys(head, self.default_taps(head.config.target_layers)), state


KIND = Eagle3Kind()


def known_tokens(head: Head) -> Tensor:
    """[V] true for the target's tokens that the heads can produce."""
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.target_ids.cpu()] = True
    return known


def vllm_keys(head: Head, default_taps: tuple[int, ...]) -> dict[str, Any]:
    """vLLM's ``config.json``. Default layers are left out, because all engines choose the same ones."""
    layers = {} if head.config.taps == default_taps else both_spellings(head.config.taps)
    return {**plain_keys(head), "architectures": ["LlamaForCausalLMEagle3"], **layers}


def _speculators_keys(head: Head, target_name: str) -> dict[str, Any]:
    """The ``config.json`` of the speculators package. It says that the residual is the raw state, since the default is
    the normalised one."""
    config, raw, own = head.config, plain_keys(head), ("draft_vocab_size", "architectures")
    layer = {key: value for key, value in raw.items() if key not in own}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]}
    method = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy], "verifier": verifier}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "speculators_config": method,
    }
