"""Token ids and images to a prompt that the target can read.

Each placeholder is repeated for every position of its image. There the target reads ids that name the image's embeddings.
Drafters, penalties and the detokenizer see the placeholders, which are ordinary tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from outrider.core.errors import RequestError
from outrider.vision.book import EmbeddingRun
from outrider.vision.families import Encode, VisionFamily, tiled_ids
from outrider.vision.hf_tower import Tower
from outrider.vision.messages import in_parts, in_text
from outrider.vision.pixels import ImageLimits, Pixels, Process, pixels_of
from outrider.vision.positions import Span, turned_positions
from outrider.vision.target import VisionTarget

_LIMITS = ImageLimits()


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt:
    """A prompt with images."""

    ids: list[int]
    """Tokens of the vocabulary, with the placeholder repeated for every position of an image."""
    read_ids: list[int]
    """The ids that the target reads at the same positions."""
    runs: tuple[EmbeddingRun, ...]
    """Embeddings that ``read_ids`` name."""


@dataclass(frozen=True)
class ImageTokens:
    """How the prompts of a checkpoint represent images."""

    token: int
    """The placeholder's token id."""
    text: str
    """The placeholder as text."""
    merge: int = 1
    """Patches along each side of one position."""
    sections: tuple[int, ...] = ()
    """Number of pairs of dimensions that each position axis rotates; empty if there is one axis."""


@final
class Vision:
    """The image-reading part of one target."""

    def __init__(
        self,
        target: VisionTarget,
        tower: Tower,
        *,
        family: VisionFamily,
        tokens: ImageTokens,
        process: Process | None,
        encode: Encode,
    ) -> None:
        self.target, self.tower, self.family, self.tokens = target, tower, family, tokens
        self._process, self._encode = process, encode

    def prompt(self, ids: Sequence[int], images: Sequence[Any]) -> EmbeddedPrompt:
        """A prompt of ``ids``, which hold one placeholder for each image."""
        self._check(ids, len(images))
        runs = [self._seen(pixels_of(image, self._processor, _LIMITS)) for image in images]
        return self._prompt(list(ids), runs)

    def written(self, messages: Sequence[Mapping[str, Any]], template: str | None) -> list[dict[str, Any]]:
        """Messages in the form that the chat template takes: in parts if it knows images, otherwise as text with
        placeholders.
        """
        knows_images = template is not None and "image" in template
        return [in_parts(one) if knows_images else in_text(one, self.tokens.text) for one in messages]

    def _processor(self, image: Any) -> Any:
        if self._process is None:
            what = "this model came without an image processor"
            raise RequestError(f"{what}; add its preprocessor_config.json, or give processed images (pixel_values ...)")
        return self._process(image)

    def _check(self, ids: Sequence[int], num_images: int) -> None:
        count, name = ids.count(self.tokens.token), self.tokens.text or f"token {self.tokens.token}"
        if count != num_images:
            hint = f"write {name} once where each image belongs" if count < num_images else "give an image for each"
            raise RequestError(f"the prompt has {count} placeholders {name} for {num_images} images; {hint}")
        if num_images and ids[-1] == self.tokens.token:
            raise RequestError("the prompt ends with an image; put text after it (a question, or the chat template)")

    def _seen(self, pixels: Pixels) -> tuple[EmbeddingRun, Pixels]:
        return self.target.book.run(pixels.key, lambda: (self._features(pixels), None)), pixels

    def _features(self, pixels: Pixels) -> Tensor:
        return self.tower.features(pixels).to(self.target.device, self.target.dtype)

    def _prompt(self, ids: list[int], seen: Sequence[tuple[EmbeddingRun, Pixels]]) -> EmbeddedPrompt:
        written: list[int] = []
        read: list[int] = []
        spans: list[Span] = []
        images = iter(seen)
        for token in ids:
            if token != self.tokens.token:
                written.append(token)
                read.append(token)
                continue
            run, pixels = next(images)
            if self.family.has_axes:
                spans.append(self._span(len(written), run, pixels))
            places = self._places(run, pixels)
            embedded = iter(run.ids)
            written += places
            read += [next(embedded) if place == self.tokens.token else place for place in places]
        runs = tuple(run for run, _ in seen)
        return self._turned(written, read, spans, runs) if spans else EmbeddedPrompt(written, read, runs)

    def _places(self, run: EmbeddingRun, pixels: Pixels) -> list[int]:
        """The tokens that stand for one image."""
        size, token = len(run.states), self.tokens.token
        return (
            tiled_ids(*pixels.tiles, size, (self.tokens.text, token), self._encode) if self.family.is_tiled else [token] * size
        )

    def _span(self, begin: int, run: EmbeddingRun, pixels: Pixels) -> Span:
        height, width = (size // self.tokens.merge for size in pixels.grid)
        if height * width != len(run.states):
            raise RequestError(
                f"image_grid_thw says {height} x {width} places, and the image has {len(run.states)}; process again"
            )
        return Span(begin, height, width)

    def _turned(
        self, written: list[int], read: list[int], spans: Sequence[Span], runs: tuple[EmbeddingRun, ...]
    ) -> EmbeddedPrompt:
        """A prompt with several position axes. Up to its last image it is one run, because rotations depend on all of it."""
        end = spans[-1].end
        key = hashlib.sha256(repr((written[:end], [(span, run.number) for span, run in zip(spans, runs)])).encode()).digest()
        whole = self.target.book.run(key, lambda: (self._states(written[:end], spans, runs), self._positions(spans)))
        return EmbeddedPrompt(written, [*whole.ids, *read[end:]], (whole,))

    def _states(self, written: Sequence[int], spans: Sequence[Span], runs: Sequence[EmbeddingRun]) -> Tensor:
        states = self.target.embed(written)
        for span, run in zip(spans, runs, strict=True):
            states[span.begin : span.end] = run.states
        return states

    def _positions(self, spans: Sequence[Span]) -> Tensor:
        return turned_positions(spans, self.tokens.sections)
