"""Medusa-2: heads and target are trained together, so that the target's states hold more information about later tokens.

First only the heads are trained, while the target is frozen. Then both are trained, and a second loss keeps the target's laws
near its original ones (Cai et al. 2024, arXiv 2401.10774: warm-up, self-distillation, LoRA or all weights).

    loss = D(p_before, p) + weight * ramp * sum_k decay^k D(p(t + 1 + k), q_k(t)),        p: the target as it is now

The result is a *changed target* and heads for it. Decoding with them is lossless with respect to the changed target, not to the
original one. The distance between the two is saved with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.models.heads import PackedTexts, new_head, save_head
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import new_config, signature_of
from outrider.models.heads.medusa import MedusaHead
from outrider.train.data import Document
from outrider.train.divergence import divergence
from outrider.train.draft_lm import DraftLM
from outrider.train.lora import add_adapters, merged_state
from outrider.train.objective import BatchOutcome, HeadObjective, HeadSettings, Objective, comparison, in_chunks

_CHUNK = 1 << 24


@dataclass(frozen=True)
class JointSettings:
    """Settings for training heads and target together."""

    num_heads: int = 4
    decay: float = 0.8
    loss: str = "forward"
    head_warmup: int = 200
    """Steps in which only the heads are trained."""
    head_weight: float = 0.2
    """Final weight of the heads' loss. It is reached after as many further steps as the warm-up has."""
    lora_rank: int = 16
    """Rank of the target's adapters; 0 trains all of its weights."""

    def __post_init__(self) -> None:
        divergence(self.loss)
        if self.num_heads < 1 or self.head_warmup < 0 or self.head_weight < 0 or self.lora_rank < 0 or not 0 < self.decay <= 1:
            found = f"num_heads = {self.num_heads}, head_warmup = {self.head_warmup}, head_weight = {self.head_weight}"
            found += f", lora_rank = {self.lora_rank}, decay = {self.decay}"
            raise OptionError(f"{found} are not valid; use at least one head, a decay up to 1, nothing negative")


class JointModule(nn.Module):
    """The trained target and its heads."""

    def __init__(self, model: DraftLM, head: MedusaHead) -> None:
        super().__init__()
        self.model, self.head = model, head

    @property
    def device(self) -> torch.device:
        return self.head.d2t.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the current target."""
        return self.model.logits(self.model.model.norm(hidden))


@final
class JointObjective(Objective):
    """Both losses of Medusa-2."""

    taps = ()

    def __init__(self, model: DraftLM, target: Target, settings: JointSettings | None = None) -> None:
        """``target`` is the initial model, whose laws are to be kept."""
        self.name, self.target, self.settings = "medusa2", target, settings or JointSettings()
        settings = self.settings
        norm, readout = model.model.norm.weight.data, model.readout.data
        config = new_config("medusa", model.raw, num_heads=settings.num_heads)
        head = new_head(config, EmbeddingAndOutput(readout.cpu(), norm.cpu(), readout.cpu(), tied=False)).to(norm.device)
        assert isinstance(head, MedusaHead)
        if settings.lora_rank:
            add_adapters(model, settings.lora_rank)
        self.joint = JointModule(model, head)
        self.module = self.joint
        shared = HeadSettings(num_depths=settings.num_heads, decay=settings.decay, loss=settings.loss)
        self._heads = HeadObjective(head, self.joint, shared)
        self._compare = comparison(divergence(settings.loss))
        self._step = 0
        self.distance = 0.0
        """Divergence between the initial and the current laws, on the last texts."""

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        self._step = step
        return documents

    @property
    def weight(self) -> float:
        """Weight of the heads' loss while the target is trained too."""
        warmup = self.settings.head_warmup
        return self.settings.head_weight * min(1.0, (self._step - warmup + 1) / max(1, warmup))

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        module, only_heads = self.joint, self._step < self.settings.head_warmup
        with torch.set_grad_enabled(torch.is_grad_enabled() and not only_heads):
            *_, states = module.model.climb(batch)
        module.head.target_norm.weight.data.copy_(module.model.model.norm.weight.data)
        seen = PackedTexts(batch.tokens, states, states.detach(), batch.segments, batch.positions, batch.supervised)
        heads = self._heads(seen)
        if only_heads:
            return heads
        size = max(1, _CHUNK // self.target.vocab_size)
        kept, _ = in_chunks(self._kept, states, batch.last, batch.valid(0), size=size, recompute=True)
        self.distance = float(kept.detach())
        return BatchOutcome(kept + self.weight * heads.loss, heads.hits, heads.valid)

    def _kept(self, states: Tensor, last: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = self.target.logits(last)
        return self._compare(self.joint.logits(states), before, mask, None)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write ``folder/target`` and ``folder/heads``."""
        model = self.joint.model
        plain = DraftLM(model.config, model.raw, model.origin).to(self.joint.device)
        plain.load_state_dict(merged_state(model))
        distance = f"{self.settings.loss} distance of its laws {self.distance:.4f}"
        changed = f"changed from {model.origin.name} by joint training; {distance}"
        plain.save(folder / "target", {**notes, "target": changed})
        head = self.joint.head
        signature = signature_of(plain.frozen(), model.config.hidden_size)
        head.config = replace(head.config, signature=signature)
        save_head(head, folder / "heads", notes={**notes, "target": f"../target, {changed}"})


def new_joint(name: str, target: Target, settings: JointSettings) -> JointObjective:
    """The objective for the target in a folder."""
    model = DraftLM.load(name, target.device)
    if model.config.vocab_size != target.vocab_size:
        raise ModelError(f"{name} has {model.config.vocab_size} tokens and the target {target.vocab_size}; use the same model")
    return JointObjective(model, target, settings)
