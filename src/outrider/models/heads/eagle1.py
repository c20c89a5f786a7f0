"""EAGLE-1: a decoder layer predicts the target's next feature from the last one and the token after it.

The feature is that of the target's last layer, and the target's own output matrix reads it. (Li et al. 2024, arXiv 2401.15077.)

    s_k = layer(fc [e(x_{t+1+k}) ; s_{k-1}]),      s_{-1} = norm(h_L)_t,      q_k = softmax(W_target s_k)
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor, nn

from outrider.models.decoder_weights import Weights
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import ReadByTarget
from outrider.models.heads.kind import Exported, HeadKind, need_whole_vocabulary, only, plain_keys
from outrider.models.heads.layer import Attending, HeadLayer


@final
class Eagle1Head(ReadByTarget):
    """Predicts features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config.layer, num_norms=0)])
        self.add_readout()

    def native_weights(self) -> Weights | None:
        first = self.layers[0]
        layer = first.native_weights() if isinstance(first, HeadLayer) else None
        if layer is None:
            return None
        embedding = self.embed_tokens.weight.data
        head = self.lm_head.weight.data if self.has_readout else embedding
        return Weights(embedding, [layer], None, head, entry=self.fc.weight.data)

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        x = self.fc(torch.cat([self.embed_tokens(tokens).to(states.dtype), states], -1))
        return self.layers[0](x, attending)


@final
class Eagle1Kind(HeadKind[Eagle1Head]):
    """Folders of EAGLE-1 heads."""

    name = "eagle1"
    module = Eagle1Head
    architectures = ("LlamaForCausalLMEagle",)
    model_type = "llama"
    has_layer = True
    training: ClassVar = {"num_depths": 3, "feature_weight": 0.5, "noise": 0.02}
    formats = ("vllm", "sglang")
    served_by = "outrider, vLLM (export vllm), SGLang (export sglang)"

    def export(self, head: Eagle1Head, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        del target_name
        need_whole_vocabulary(head.config)
        kept = only(state, "fc.", "layers.", "embed_tokens.")
        if form == "sglang":  # its fc always has a bias, left as it is in memory if the file has none
            kept["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=kept["fc.weight"].dtype)
        architecture = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[form]
        keys = {key: value for key, value in plain_keys(head).items() if key != "draft_vocab_size"}
        return {**keys, "architectures": [architecture]}, kept


KIND = Eagle1Kind()
