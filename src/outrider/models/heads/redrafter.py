"""ReDrafter: one recurrent cell for all depths. The next token is predicted from its state and the target's, side by side.

(Zhang et al. 2024, arXiv 2403.09919.)

    s_k = silu(W e(x_{t+1+k}) + U s_{k-1} + b),   s_{-1} = 0,   q_k = softmax(V res([h_t ; s_k]))

h is the target's last state after its final norm; e the target's embedding, which is not trained.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.blocks import ResidualBlocks
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.kind import Exported, HeadKind, Raw, need_whole_vocabulary, only
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights
from outrider.models.heads.recurrent import RecurrentHead

_SEQUENCE = re.compile(r"lm_head\.(\d+)(\.linear)?\.(weight|bias)")
"""Apple's output is one sequence: ``lm_head.{layer}.linear.weight`` of the blocks, then ``lm_head.{last}.weight``."""


@final
class RedrafterHead(RecurrentHead):
    """One cell for all depths. A state holds the target's state beside its own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size, width = config.hidden_size, config.inner_size or 2 * config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.rnn_w = nn.Linear(size, size, bias=False)
        self.rnn_u = nn.Linear(size, size)
        self.input_proj = nn.Linear(2 * size, width) if width != 2 * size else None
        self.blocks = ResidualBlocks(width, config.num_blocks)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)

    def begin(self, features: Tensor) -> Tensor:
        states = self.target_norm(features)
        return torch.cat([states, torch.zeros_like(states)], -1)

    def advance(self, depth: int, states: Tensor, tokens: Tensor) -> Tensor:
        del depth
        context, cell = states.chunk(2, -1)
        cell = F.silu(self.rnn_w(self.embed_tokens(tokens).to(cell.dtype)) + self.rnn_u(cell))
        return torch.cat([context.to(cell.dtype), cell], -1)

    def native_levels(self) -> HeadWeights:
        added, moved = Affine.of(self.rnn_w), Affine.of(self.rnn_u)
        level = LevelWeights(
            readout=Affine.of(self.lm_head).weight,
            blocks=self.blocks.native_weights(),
            enter=None if self.input_proj is None else Affine.of(self.input_proj),
            cell=Affine(torch.cat((added.weight, moved.weight), 1), moved.bias),
            embedding=self.embed_tokens.weight.data,
        )
        return HeadWeights(levels=(level,), state_norm=self.target_norm.weight.data, moving="cell", joins=True)

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.lm_head(self.blocks(state if self.input_proj is None else self.input_proj(state)))


@final
class RedrafterKind(HeadKind[RedrafterHead]):
    """Folders of ReDrafter heads."""

    name = "redrafter"
    module = RedrafterHead
    architectures = ("Drafter",)
    model_type = "recurrent_drafting_drafter"
    training: ClassVar = {"num_depths": 5, "num_blocks": 2}
    formats = ("apple",)

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        sizes = {"rnn": True, "exit_dim": raw.get("exit_dim") or 2 * raw["hidden_size"]}
        return {**super().new_keys(raw), **sizes, "num_draft_layers": raw["outrider"].get("num_blocks", 2)}

    def problems(self, raw: Raw) -> list[str]:
        if raw.get("rnn") is False:
            return ["rnn is off: the state is a plain sum of embeddings, which is not supported here"]
        return []

    def tensor_name(self, name: str) -> str:
        match = _SEQUENCE.fullmatch(name)
        if match is None:
            return name
        layer, linear, part = match.groups()
        return f"blocks.layers.{layer}.{part}" if linear else f"lm_head.{part}"

    def export(self, head: RedrafterHead, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Blocks and output matrix are one sequence there."""
        del form, target_name
        need_whole_vocabulary(head.config)
        config, kept = head.config, only(state, "rnn_", "input_proj.")
        for name, tensor in only(state, "blocks.").items():
            _, _, layer, part = name.split(".")
            kept[f"lm_head.{layer}.linear.{part}"] = tensor
        kept[f"lm_head.{config.num_blocks}.weight"] = state["lm_head.weight"]
        named = {"model_type": self.model_type, "architectures": ["Drafter"], "vocab_size": config.vocab_size}
        sizes = {"hidden_size": config.hidden_size, "exit_dim": config.inner_size or 2 * config.hidden_size}
        return {**named, **sizes, "num_draft_layers": config.num_blocks, "rnn": True}, kept


KIND = RedrafterKind()
