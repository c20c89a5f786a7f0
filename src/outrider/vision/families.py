"""Which vision-language checkpoints are known, and how each writes an image into a prompt.

llava            <image> once per feature
qwen2_vl, 2.5    <|image_pad|> once per feature; places have three axes of positions
idefics3, smolvlm   a large image is cut into tiles, each with a tag of its own, and shown once more as a whole
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ModelError, RequestError

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class VisionFamily:
    """Properties of a family."""

    text_module: str
    """The attribute of transformers' model that holds the language model."""
    text_type: str | None = None
    """The decoder's name for the family of the language model, if the checkpoint uses another name."""
    has_axes: bool = False
    """Whether positions of an image have several axes."""
    is_tiled: bool = False
    """Whether images are cut into tiles, which are marked by tags."""


FAMILIES = {
    "llava": VisionFamily("language_model"),
    "qwen2_vl": VisionFamily("language_model", "qwen2", has_axes=True),
    "qwen2_5_vl": VisionFamily("language_model", "qwen2", has_axes=True),
    "idefics3": VisionFamily("text_model", is_tiled=True),
    "smolvlm": VisionFamily("text_model", is_tiled=True),
}
"""Families by the ``model_type`` of config.json."""


def family_of(raw: Mapping[str, Any]) -> VisionFamily | None:
    """The family of a config.json; None for a text model and for unknown vision-language models."""
    return FAMILIES.get(str(raw.get("model_type"))) if "vision_config" in raw else None


def tiled_text(rows: int, columns: int, num_each: int, image_token: str) -> str:
    """The text that stands for an image of Idefics3 or SmolVLM in a prompt: rows of tiles, then the whole image, with
    ``num_each`` features per tile."""
    around, places = "<fake_token_around_image>", image_token * num_each
    tiles = [[f"{around}<row_{i + 1}_col_{j + 1}>{places}" for j in range(columns)] for i in range(rows)]
    lines = "".join(f"{''.join(line)}\n" for line in tiles)
    return f"{lines}\n{around}<global-img>{places}{around}" if rows else f"{around}<global-img>{places}{around}"


def tiled_ids(rows: int, columns: int, num_places: int, image_token: tuple[str, int], encode: Encode) -> list[int]:
    """Token ids of ``tiled_text`` for an image of ``num_places`` features. ``image_token`` is the placeholder with its id."""
    num_tiles = rows * columns + 1
    if num_places % num_tiles:
        raise RequestError(f"an image of {num_places} features does not divide into {num_tiles} tiles; process it again")
    ids = list(encode(tiled_text(rows, columns, num_places // num_tiles, image_token[0])))
    if ids.count(image_token[1]) != num_places:
        raise ModelError(f"the tokenizer does not know {image_token[0]!r} and the tags of tiles; fetch tokenizer.json again")
    return ids
