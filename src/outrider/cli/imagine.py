"""Runs ``outrider imagine``."""

from __future__ import annotations

import argparse
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import torch

from outrider.cli.imagine_ways import ImageDrawing, draw
from outrider.core.errors import OptionError
from outrider.images.drawing import drawn, passes_of_rows
from outrider.images.model import Picture
from outrider.images.png import png_bytes, write_png
from outrider.viz.page import image_page


def run(arguments: argparse.Namespace) -> int:
    if arguments.num < 1:
        raise OptionError(f"--num {arguments.num} is not valid; use at least 1")
    if arguments.out.suffix.lower() != ".png":
        raise OptionError(f"--out {arguments.out} is not valid; give the name of a .png file")
    drawing = draw(arguments)
    write_png(arguments.out, torch.cat([drawn(one) if arguments.show else _plain(one) for one in drawing.pictures]))
    if arguments.show:
        _write_page(arguments, drawing)
    _tell(arguments, drawing)
    return 0


def _page(arguments: argparse.Namespace) -> Path:
    return arguments.out.with_suffix(".html")


def _write_page(arguments: argparse.Namespace, drawing: ImageDrawing) -> None:
    """Write the page that shows the images growing, beside the image file."""
    images = [
        {
            "image": "data:image/png;base64," + b64encode(png_bytes(one.pixels)).decode(),
            "grid": drawing.grid,
            "rounds": one.rounds,
            "origins": [origin.name.lower() for origin in one.origins],
        }
        for one in drawing.pictures
    ]
    page = image_page(f"class {arguments.label}, {drawing.way}, {'lossless' if drawing.lossless else 'lossy'}", images)
    _page(arguments).write_text(page, encoding="utf-8")


def _plain(picture: Picture[Any]) -> torch.Tensor:
    """The image, enlarged eight times."""
    return picture.pixels.repeat_interleave(8, 0).repeat_interleave(8, 1)


def _tell(arguments: argparse.Namespace, drawing: ImageDrawing) -> None:
    told = [
        {
            "tokens": len(one.tokens),
            "passes": one.stats.num_passes,
            "accepted": one.stats.num_accepted,
            "tested": one.stats.num_tested,
            "seconds": round(one.stats.seconds, 4),
            "passes_of_rows": passes_of_rows(one.rounds, drawing.grid),
            "lossless": drawing.lossless,
        }
        for one in drawing.pictures
    ]
    if arguments.json:
        page = {"page": str(_page(arguments))} if arguments.show else {}
        print(json.dumps({"file": str(arguments.out), **page, "images": told}))
        return
    for one in told:
        kept = f"{one['accepted']} of {one['tested']} tested guesses kept"
        fewer = f"{one['tokens'] / one['passes']:.2f} {drawing.noun} per pass"
        law = "lossless" if drawing.lossless else "LOSSY"
        print(f"{one['tokens']} {drawing.noun} in {one['passes']} passes ({fewer}); {kept}; {law}")
    print(arguments.out)
    if arguments.show:
        print(f"{_page(arguments)}: open it in a browser")
