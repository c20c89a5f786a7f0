"""The base of heads for vision-language targets: finds the columns of images, and replaces the layer's input there.

A column is (the target's state at a place, the token after it). A column is visual where that token is an image's placeholder.
The target's first tap is the input of its first layer, which at such a place is the image's embedding. So heads that read taps
0 and L see images through the states that they are given anyway. An image is a run of visual columns. A kind says what enters
the draft's layer for a run: one vector a column, or fewer. What enters stays at its own column, so positions never change; the
other columns of the run are left out of the layer, and of the draft's cache.

    text column c      fc [e(x_{c+1}) ; s_c]                        s_c = norm(h_L)_c, or the draft's own state below the root
    visual column c    entry_c(embeddings of the run), or nothing

In training all columns are computed and those left out are hidden from attention; while drafting they are not computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import ReadByTarget
from outrider.models.heads.head import PackedTexts
from outrider.models.heads.kind import HeadKind, Raw
from outrider.models.heads.layer import Attending, HeadLayer, PackedAttending


@dataclass(frozen=True, eq=False)
class Runs:
    """The visual columns of a batch, one row for each image: I images of at most M columns."""

    images: Tensor
    """[N] the image of each visual column, ascending."""
    places: Tensor
    """[N] its position within the image."""
    sizes: Tensor
    """[I] columns of each image."""

    @property
    def there(self) -> Tensor:
        """[I, M] true for columns, false for padding."""
        longest = int(self.sizes.max()) if len(self.sizes) else 0
        return torch.arange(longest, device=self.sizes.device) < self.sizes[:, None]

    def laid(self, values: Tensor) -> Tensor:
        """[I, M, ...] from [N, ...], zero where there is no column."""
        there = self.there
        laid = values.new_zeros(*there.shape, *values.shape[1:])
        return laid.index_put((self.images, self.places), values)


@dataclass(frozen=True, eq=False)
class ColumnBatch:
    """Columns of texts with images, in rows of L."""

    tokens: Tensor
    """[R, L] the token after the column's position."""
    states: Tensor
    """[R, L, H] the target's last states, normed."""
    embedded: Tensor
    """[R, L, H] input of the target at the token; used at visual columns only."""
    visual: Tensor
    """[R, L]"""
    asked: Tensor
    """[R, L] whether the token belongs to a prompt."""
    segments: Tensor
    """[R, L] number of the text within its row."""
    carried: Tensor
    """[R, C] state carried on from images that were read before."""

    @cached_property
    def numbers(self) -> Tensor:
        """[R, L] the image of a visual column; -1 elsewhere."""
        before = torch.nn.functional.pad(self.visual[:, :-1], (1, 0))
        begins = (self.visual & ~before).flatten()
        return torch.where(self.visual, begins.cumsum(0).view_as(self.visual) - 1, -1)

    @cached_property
    def runs(self) -> Runs:
        images = self.numbers[self.visual]
        sizes = torch.bincount(images) if len(images) else images
        firsts = sizes.cumsum(0) - sizes
        places = torch.arange(len(images), device=images.device) - firsts[images] if len(images) else images
        return Runs(images, places, sizes)

    @cached_property
    def latest(self) -> Tensor:
        """[R, L] the newest image of the same text at or before each column; -1 where there is none."""
        if not len(self.runs.sizes):
            return self.numbers
        found = self.numbers.cummax(1).values
        owner = self.segments.new_zeros(len(self.runs.sizes))
        owner[self.runs.images] = self.segments[self.visual]
        return torch.where((found >= 0) & (owner[found.clamp(min=0)] == self.segments), found, -1)


@dataclass(frozen=True, eq=False)
class Entries:
    """The input of the draft's layer."""

    inputs: Tensor
    """[R, L, H]"""
    kept: Tensor
    """[R, L] columns that enter the layer."""
    carried: Tensor
    """[R, L, C] state carried beside the layer's states."""


class VisualHead(ReadByTarget, ABC):
    """A layer that continues the target's features and reads images. A state is [feature ; carried state]."""

    num_carried = 0
    """Size of the carried state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.layer is not None
        self.image_token = int(config.raw["image_token_id"])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config.layer, num_norms=0)])
        self.add_parts()
        self.add_readout()

    def add_parts(self) -> None:
        """Add the kind's own modules."""

    @abstractmethod
    def entries(self, columns: ColumnBatch) -> Entries:
        """The layer's input for columns of the target."""

    @abstractmethod
    def entering(self, embedded: Tensor, states: Tensor, carried: Tensor) -> Tensor:
        """[..., H] the layer's input at a text column."""

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features[..., -self.config.hidden_size :])

    def embedded(self, features: Tensor) -> Tensor:
        """[..., H] the part of features that was the target's input."""
        return features[..., : self.config.hidden_size]

    def said(self, state: Tensor) -> Tensor:
        return state[..., : self.config.hidden_size]

    def aligned(self, states: Tensor) -> Tensor:
        return self.said(states)

    def through(self, entries: Entries, attending: Attending) -> Tensor:
        """[R, L, H + C] states after the layer."""
        return torch.cat([self.layers[0](entries.inputs, attending), entries.carried], -1)

    def step(self, tokens: Tensor, states: Tensor, attending: Attending) -> Tensor:
        size = self.config.hidden_size
        carried = states[..., size:]
        inputs = self.entering(self.embed_tokens(tokens).to(states.dtype), states[..., :size], carried)
        return torch.cat([self.layers[0](inputs, attending), carried], -1)

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        assert self.config.layer is not None
        entries = self.entries(self.columns_of(batch))
        attending = PackedAttending(batch, self.rotations, self.config.layer, kept=entries.kept)
        states = self.through(entries, attending)
        yield states
        for depth in range(1, count):
            states = self.step(batch.shifted(batch.tokens, depth + 1), states, attending)
            yield states

    def columns_of(self, batch: PackedTexts) -> ColumnBatch:
        """The columns of packed texts."""
        tokens, segments = batch.shifted(batch.tokens, 1), batch.segments
        same = (batch.shifted(segments + 1, 1) == segments + 1) & (segments >= 0)
        return ColumnBatch(
            tokens,
            self.fuse(batch.features),
            self.embedded(batch.shifted(batch.features, 1)),
            (tokens == self.image_token) & same,
            ~batch.shifted(batch.supervised, 1) & same,
            segments,
            batch.features.new_zeros(len(tokens), self.num_carried),
        )

    def text_entries(self, columns: ColumnBatch, carried: Tensor) -> Tensor:
        """[R, L, H] the layer's input if every column is text."""
        return self.entering(self.embed_tokens(columns.tokens).to(columns.states.dtype), columns.states, carried)


Module = TypeVar("Module", bound=VisualHead)


class VisualKind(HeadKind[Module], ABC):
    """Folders of heads for vision-language targets. They read what enters the target and what its last layer says."""

    model_type = "llama"
    has_layer = True
    num_taps = 2

    def default_taps(self, num_layers: int) -> tuple[int, ...]:
        return (0, num_layers)

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        if raw.get("image_token_id") is None:
            raise ModelError(f"{self.name} heads draft for vision-language targets, and this one reads text; use 'eagle1'")
        return super().new_keys(raw)
