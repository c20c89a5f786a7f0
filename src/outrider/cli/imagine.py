"""Runs ``outrider imagine``."""

from __future__ import annotations

import argparse
import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.bundled import bundled_path
from outrider.cli.options import value_of
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError
from outrider.images.drawing import drawn, passes_of_rows
from outrider.images.model import ImageModel, Picture, named_way
from outrider.images.png import png_bytes, write_png
from outrider.methods import METHODS, RULES
from outrider.viz.page import image_page


def run(arguments: argparse.Namespace) -> int:
    arguments.model = arguments.model or Path(bundled_path("digits/target"))
    if arguments.num < 1:
        raise OptionError(f"--num {arguments.num} is not valid; use at least 1")
    if arguments.out.suffix.lower() != ".png":
        raise OptionError(f"--out {arguments.out} is not valid; it must end in .png")
    _check_names(arguments)
    with waiting(f"loading {arguments.model}"):
        model = ImageModel.load(arguments.model, draft=arguments.draft, guidance=arguments.guidance, device=arguments.device)
    method = model.compose(arguments.method, acceptance=arguments.acceptance, options=_options(arguments))
    params = model.params(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    with waiting(f"drawing {arguments.num} images"):
        pictures = model.imagine([arguments.label] * arguments.num, method, params)
    write_png(arguments.out, torch.cat([drawn(one) if arguments.show else _plain(one) for one in pictures]))
    if arguments.show:
        _write_page(arguments, pictures, model.codebook.grid, lossless=method.lossless)
    _tell(arguments, pictures, model.codebook.grid, lossless=method.lossless)
    return 0


def _page(arguments: argparse.Namespace) -> Path:
    return arguments.out.with_suffix(".html")


def _write_page(arguments: argparse.Namespace, pictures: Sequence[Picture], grid: int, *, lossless: bool) -> None:
    """The page beside the file, on which the images grow."""
    images = [
        {
            "image": "data:image/png;base64," + b64encode(png_bytes(one.pixels)).decode(),
            "grid": grid,
            "rounds": one.rounds,
            "origins": [origin.name.lower() for origin in one.origins],
        }
        for one in pictures
    ]
    way = " + ".join(dict.fromkeys(filter(None, (arguments.method, arguments.acceptance))))
    page = image_page(f"class {arguments.label}, {way}, {'lossless' if lossless else 'lossy'}", images)
    _page(arguments).write_text(page, encoding="utf-8")


def _check_names(arguments: argparse.Namespace) -> None:
    """Refuse an unknown method or rule before weights are read."""
    name, rule = named_way(arguments.method, arguments.acceptance)
    assert METHODS[name] is not None and RULES[rule] is not None


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = dict(_pair(text) for text in arguments.option)
    return {"num_draft_tokens": arguments.window, **given}


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--option {text!r} is not NAME=VALUE; write for example -O fill=uniform")
    return name, value_of(value)


def _plain(picture: Picture) -> torch.Tensor:
    """The image at eight times its size."""
    return picture.pixels.repeat_interleave(8, 0).repeat_interleave(8, 1)


def _tell(arguments: argparse.Namespace, pictures: Sequence[Picture], grid: int, *, lossless: bool) -> None:
    told = [
        {
            "tokens": len(one.tokens),
            "passes": one.stats.num_passes,
            "accepted": one.stats.num_accepted,
            "tested": one.stats.num_tested,
            "passes_of_rows": passes_of_rows(one.rounds, grid),
            "lossless": lossless,
        }
        for one in pictures
    ]
    if arguments.json:
        page = {"page": str(_page(arguments))} if arguments.show else {}
        print(json.dumps({"file": str(arguments.out), **page, "images": told}))
        return
    for one in told:
        kept = f"{one['accepted']} of {one['tested']} tested guesses kept"
        fewer = f"{one['tokens'] / one['passes']:.2f} codes per pass"
        print(f"{one['tokens']} codes in {one['passes']} passes ({fewer}); {kept}; {'lossless' if lossless else 'LOSSY'}")
    print(arguments.out)
    if arguments.show:
        print(f"{_page(arguments)}: open it in a browser")
