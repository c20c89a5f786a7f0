"""SpecVLM: EAGLE whose visual columns go through a compressor that is chosen by the question.

Several experts shorten the columns of an image in their own ways. A gate reads the image and the question after it, and picks
one of them: with Gumbel noise and a straight-through gradient in training, the likeliest while drafting. (Huang et al. 2025,
SpecVLM, arXiv 2509.11815. Its code was not read: shapes of the experts and the gate are ours.)

    z_c = fc [norm e_{c+1} ; norm s_c]                                    at text and visual columns alike
    full  all z        pool  mean of r neighbours        conv  W [z_1 .. z_r] of r neighbours        none  nothing
    prune the 1/r with the highest scores, times sigmoid(score)          resampler  learned queries (as in ViSpec)
    expert = argmax (gate [mean of z over the image ; mean of e over the question] + Gumbel noise)

With ``visual_experts=full`` it is the paper's EagleVLM, with ``none`` a draft that reads no visual column at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ModelError, nearest
from outrider.core.method_rows import names_in
from outrider.models.heads.head import HeadNorm
from outrider.models.heads.kind import Raw
from outrider.models.heads.resampler import Resampler, spread_last
from outrider.models.heads.visual import ColumnBatch, Entries, VisualHead, VisualKind

DEFAULT_EXPERTS = ("prune", "pool", "conv", "resampler", "none")
_NUM_QUERIES = 2


class ExpertSizes(NamedTuple):
    """Sizes for building an expert."""

    width: int
    num_heads: int
    ratio: int
    """Number of columns merged into one."""


class Expert(nn.Module, ABC):
    """One way to compress images."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        self.sizes = sizes

    @abstractmethod
    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """[I, M, H] vectors at the columns of images, and [I, M] which are kept."""


@final
class Full(Expert):
    """Keeps every column."""

    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        return columns, there


@final
class Nothing(Expert):
    """Keeps no column: the draft reads text alone."""

    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        return columns, torch.zeros_like(there)


class GroupMerge(Expert, ABC):
    """Merges neighbours into one vector, at the last of their columns."""

    @abstractmethod
    def join(self, groups: Tensor, there: Tensor) -> Tensor:
        """[I, G, H] from [I, G, r, H]; padding is zero."""

    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        longest, ratio = columns.shape[1], self.sizes.ratio
        spare = -longest % ratio
        groups = F.pad(columns, (0, 0, 0, spare)).unflatten(1, (-1, ratio))
        joined = self.join(groups, F.pad(there, (0, spare)).unflatten(1, (-1, ratio)))
        place = torch.arange(longest, device=there.device)
        is_last = (place % ratio == ratio - 1) | (place == there.sum(1, keepdim=True) - 1)
        return joined.repeat_interleave(ratio, 1)[:, :longest], there & is_last


@final
class MeanPool(GroupMerge):
    """Merges by the mean."""

    def join(self, groups: Tensor, there: Tensor) -> Tensor:
        return groups.sum(2) / there.sum(2, keepdim=True).clamp(min=1)


@final
class Conv(GroupMerge):
    """Merges by a matrix over neighbours, which starts as the mean."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__(sizes)
        self.proj = nn.Linear(sizes.ratio * sizes.width, sizes.width, bias=False)
        with torch.no_grad():
            self.proj.weight.copy_(torch.cat([torch.eye(sizes.width) / sizes.ratio] * sizes.ratio, 1))

    def join(self, groups: Tensor, there: Tensor) -> Tensor:
        del there
        return self.proj(groups.flatten(2))


@final
class Prune(Expert):
    """Keeps the columns with the highest scores."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__(sizes)
        self.score = nn.Linear(sizes.width, 1, bias=False)

    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(columns)[..., 0]
        order = scores.masked_fill(~there, -torch.inf).argsort(dim=1, descending=True, stable=True)
        kept = there & (order.argsort(dim=1) < -(-there.sum(1, keepdim=True) // self.sizes.ratio))
        return columns * torch.sigmoid(scores)[..., None], kept


@final
class Resampled(Expert):
    """Replaces columns by the outputs of learned queries."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__(sizes)
        self.resampler = Resampler(sizes.width, sizes.num_heads, _NUM_QUERIES)

    def forward(self, columns: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        return spread_last(self.resampler(columns, there), there)


EXPERTS: Mapping[str, type[Expert]] = {
    "full": Full,
    "none": Nothing,
    "pool": MeanPool,
    "conv": Conv,
    "prune": Prune,
    "resampler": Resampled,
}


@final
class SpecvlmHead(VisualHead):
    """A gate over experts."""

    def add_parts(self) -> None:
        config, size = self.config, self.config.hidden_size
        assert config.layer is not None
        names = names_in(config.raw["visual_experts"])
        sizes = ExpertSizes(size, config.layer.num_heads, int(config.raw["visual_ratio"]))
        self.embed_norm, self.state_norm = (HeadNorm(size, config.norm_eps) for _ in range(2))
        self.experts = nn.ModuleDict({name: EXPERTS[name](sizes) for name in names})
        self.gate = nn.Linear(2 * size, len(names)) if len(names) > 1 else None

    def entering(self, embedded: Tensor, states: Tensor, carried: Tensor) -> Tensor:
        del carried
        return self.fc(torch.cat([self.embed_norm(embedded), self.state_norm(states)], -1))

    def entries(self, columns: ColumnBatch) -> Entries:
        visual, nothing, inputs = columns.visual, columns.states[..., :0], self._inputs(columns)
        if not len(columns.runs.sizes):
            return Entries(inputs, ~visual, nothing)
        laid, there = columns.runs.laid(inputs[visual]), columns.runs.there
        made = [expert(laid, there) for expert in self.experts.values()]
        shares = self.shares(columns, laid)
        kept = torch.stack([kept for _, kept in made], 1)
        vectors = torch.stack([vectors for vectors, _ in made], 1) * kept[..., None]
        vectors = (shares[..., None, None].to(vectors.dtype) * vectors).sum(1)
        kept = kept[torch.arange(len(kept), device=kept.device), shares.argmax(1)]
        inputs = inputs.masked_scatter(visual[..., None], vectors[there].to(inputs.dtype))
        return Entries(inputs, (~visual).masked_scatter(visual, kept[there]), nothing)

    def chosen(self, columns: ColumnBatch) -> Tensor:
        """[I] the number of the expert chosen for each image."""
        return self.shares(columns, columns.runs.laid(self._inputs(columns)[columns.visual])).argmax(1)

    def _inputs(self, columns: ColumnBatch) -> Tensor:
        """[R, L, H] mixtures of embeddings and features; embeddings of words at text, of places at images."""
        words = self.embed_tokens(columns.tokens).to(columns.states.dtype)
        embedded = torch.where(columns.visual[..., None], columns.embedded.to(words.dtype), words)
        return self.entering(embedded, columns.states, columns.states[..., :0])

    def shares(self, columns: ColumnBatch, laid: Tensor) -> Tensor:
        """[I, experts] one-hot choice of an expert for each image, with a soft gradient."""
        if self.gate is None:
            return laid.new_ones(len(laid), 1)
        seen = laid.sum(1) / columns.runs.sizes[:, None]
        logits = self.gate(torch.cat([seen, self._question(columns).to(seen.dtype)], -1)).float()
        if self.training:
            return F.gumbel_softmax(logits, tau=1.0, hard=True)
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)

    def _question(self, columns: ColumnBatch) -> Tensor:
        """[I, H] mean embedding of the prompt's words after each image, up to the next one."""
        behind = columns.asked & ~columns.visual & (columns.latest >= 0)
        images, words = columns.latest[behind], self.embed_tokens(columns.tokens[behind])
        total = words.new_zeros(len(columns.runs.sizes), words.shape[-1]).index_add(0, images, words)
        return total / torch.bincount(images, minlength=len(total)).clamp(min=1)[:, None]


@final
class SpecvlmKind(VisualKind[SpecvlmHead]):
    """Folders of SpecVLM heads."""

    name = "specvlm"
    module = SpecvlmHead
    architectures = ("OutriderSpecvlmHead",)
    training: ClassVar = {"num_depths": 3, "feature_weight": 0.1}

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        names, ratio = names_in(raw.get("visual_experts", DEFAULT_EXPERTS)), int(raw.get("visual_ratio", 4))
        bad = next((name for name in names if name not in EXPERTS), None)
        if bad is not None:
            raise ModelError(f"visual_experts: {bad!r} is not an expert; {nearest(bad, EXPERTS)}")
        if not names or ratio < 1:
            raise ModelError(
                f"visual_experts = {list(names)}, visual_ratio = {ratio} are not valid; name one, and use 1 or more"
            )
        return {**super().new_keys(raw), "visual_experts": list(names), "visual_ratio": ratio}


KIND = SpecvlmKind()
