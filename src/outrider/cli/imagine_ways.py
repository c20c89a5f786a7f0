"""The two kinds of image models of ``outrider imagine``: codes, which the engine writes, and continuous tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bundled import bundled_path
from outrider.cli.options import value_of
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError
from outrider.images.continuous.imagine import ContinuousImages, is_continuous, way_of
from outrider.images.continuous.rules import PATH_RULES
from outrider.images.model import ImageModel, Picture, named_way
from outrider.methods import METHODS, RULES


class ImageDrawing(NamedTuple):
    """Images, and the way they were made."""

    pictures: Sequence[Picture[Any]]
    way: str
    grid: int
    """Tokens of a row of the image."""
    lossless: bool
    noun: str
    """The word for tokens of this kind."""


def draw(arguments: argparse.Namespace) -> ImageDrawing:
    """The images that were asked for."""
    continuous = arguments.model is not None and is_continuous(arguments.model)
    return _draw_tokens(arguments) if continuous else _draw_codes(arguments)


def _draw_codes(arguments: argparse.Namespace) -> ImageDrawing:
    folder, draft, name = arguments.model, arguments.draft, arguments.method or "sjd"
    if folder is None:
        folder, draft = Path(bundled_path("digits/target")), draft or Path(bundled_path("digits/draft"))
    _check_names(name, arguments.acceptance, folder)
    with waiting(f"loading {folder}"):
        model = ImageModel.load(folder, draft=draft, guidance=arguments.guidance, device=arguments.device)
    options = {"num_draft_tokens": 16 if arguments.window is None else arguments.window, **_options(arguments)}
    method = model.compose(name, acceptance=arguments.acceptance, options=options)
    params = model.params(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    with waiting(f"drawing {arguments.num} images"):
        pictures = model.imagine([arguments.label] * arguments.num, method, params)
    way = " + ".join(dict.fromkeys(filter(None, (name, arguments.acceptance))))
    return ImageDrawing(pictures, way, model.codebook.grid, method.lossless, "codes")


def _check_names(name: str, acceptance: str | None, folder: Path) -> None:
    """Refuse an unknown method or rule before weights are read."""
    for one in (name, acceptance):
        if one in PATH_RULES:
            raise OptionError(
                f"{one!r} is a rule of continuous tokens, and {folder} holds codes; give --model a folder that "
                "recipes/images_continuous.py made, or another method (see `outrider methods`)"
            )
    method, rule = named_way(name, acceptance)
    assert METHODS[method] is not None and RULES[rule] is not None


def _draw_tokens(arguments: argparse.Namespace) -> ImageDrawing:
    _refuse_options_of_codes(arguments)
    name = arguments.method or "joint-path"
    window = {} if arguments.window is None else {"window": arguments.window}
    way = way_of(name, {**window, **_options(arguments)})
    with waiting(f"loading {arguments.model}"):
        images = ContinuousImages.load(arguments.model, draft=arguments.draft)
    with waiting(f"drawing {arguments.num} images"):
        pictures = images.imagine([arguments.label] * arguments.num, way, seed=arguments.seed)
    return ImageDrawing(pictures, name, images.grid, way.lossless, "tokens")


def _refuse_options_of_codes(arguments: argparse.Namespace) -> None:
    """Refuse options that only image codes have."""
    given = {
        "--acceptance": arguments.acceptance is not None,
        "--guidance": arguments.guidance != 1.0,
        "--temperature": arguments.temperature != 1.0,
        "--top-k": arguments.top_k != 0,
        "--device": arguments.device not in (None, "auto", "cpu"),
    }
    wrong = next((flag for flag, asked in given.items() if asked), None)
    if wrong is not None:
        remedy = {"--acceptance": "name the rule with --method", "--device": "it runs on the CPU"}.get(wrong, "leave it out")
        raise OptionError(f"{wrong} is for models of codes, and {arguments.model} holds continuous tokens; {remedy}")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return dict(_pair(text) for text in arguments.option)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--option {text!r} is not NAME=VALUE; write for example -O fill=uniform")
    return name, value_of(value)
