"""Pictures of how an image was made: the image, the origin of each code, the pass that wrote it, and the passes per row.

Four panels of one height. The second colours every code by its origin (accepted, recovered, bonus). The third shades it by its
pass, from the first (dark) to the last (bright). The bars on the right count the passes that wrote into each row of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.request import Origin
from outrider.images.codebook import Codebook
from outrider.images.model import Picture

_COLOURS = {
    Origin.ACCEPTED: (0.16, 0.62, 0.35),
    Origin.RECOVERED: (0.84, 0.37, 0.18),
    Origin.BONUS: (0.23, 0.44, 0.77),
}
_GROUND, _BAR = 0.96, (0.35, 0.35, 0.40)
_GAP = 8
"""Pixels between panels."""
_FONT = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 1, 1, 1),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
}
"""Digits of three by five dots, each row as three bits."""


def passes_of_rows(rounds: Sequence[int], grid: int) -> list[int]:
    """Number of passes that wrote into each row of codes."""
    return [len(set(rounds[row * grid : (row + 1) * grid])) for row in range(grid)]


def drawn(picture: Picture[Any], *, size: int = 224) -> Tensor:
    """[height, width, 3] the sheet of a picture. Panels are ``size`` pixels, or slightly smaller."""
    grid = round(len(picture.tokens) ** 0.5)
    cell = max(size // grid, 1)
    side = cell * grid
    image = _resized(_coloured(picture.pixels), side)
    origins = _cells([_COLOURS[origin] for origin in picture.origins], grid, cell)
    shades = _cells([_shade(number, picture.rounds[-1]) for number in picture.rounds], grid, cell)
    bars = _bars(passes_of_rows(picture.rounds, grid), grid, cell)
    gap = torch.full((side, _GAP, 3), _GROUND)
    parts = [part for panel in (image, origins, shades, bars) for part in (gap, panel)]
    sheet = torch.cat([*parts, gap], 1)
    margin = torch.full((_GAP, sheet.shape[1], 3), _GROUND)
    return torch.cat([margin, sheet, margin])


def growing(picture: Picture[int], codebook: Codebook, *, num_frames: int = 8, size: int = 84) -> Tensor:
    """[height, width, 3] the image after every few passes, side by side. Missing tokens are black."""
    written, tokens = torch.tensor(picture.rounds), torch.tensor([picture.tokens])
    grid, side = codebook.grid, codebook.side
    gap = torch.full((size, _GAP, 3), _GROUND)
    parts = [gap]
    for frame in range(num_frames):
        seen = (written <= picture.rounds[-1] * (frame + 1) / num_frames).view(grid, grid)
        mask = _resized(seen, side)[..., None]
        parts += [_resized(_coloured(codebook.decode(tokens)[0] * mask), size), gap]
    return torch.cat(parts, 1)


def _coloured(pixels: Tensor) -> Tensor:
    return pixels.expand(-1, -1, 3)


def _resized(pixels: Tensor, side: int) -> Tensor:
    """The image in another size, by nearest neighbour."""
    places = (torch.arange(side) * len(pixels)) // side
    return pixels[places][:, places]


def _cells(colours: Sequence[tuple[float, float, float]], grid: int, cell: int) -> Tensor:
    """A square per code, with a thin line around it."""
    squares = torch.tensor(colours).view(grid, 1, grid, 1, 3).expand(grid, cell, grid, cell, 3).clone()
    if cell > 3:
        squares[:, -1], squares[:, :, :, -1] = _GROUND, _GROUND
    return squares.reshape(grid * cell, grid * cell, 3)


def _shade(number: int, last: int) -> tuple[float, float, float]:
    share = number / max(last, 1)
    return 0.15 + 0.80 * share, 0.10 + 0.75 * share, 0.45 + 0.10 * share


def _bars(counts: Sequence[int], grid: int, cell: int) -> Tensor:
    """A bar for each row of codes, as long as its number of passes, with that number after it."""
    unit = max(cell // 2, 2)
    panel = torch.full((grid * cell, grid * unit + 24, 3), _GROUND)
    for row, count in enumerate(counts):
        top = row * cell
        panel[top + 1 : top + cell - 1, : count * unit] = torch.tensor(_BAR)
        _write(panel, str(count), top + cell // 2 - 5, count * unit + 4)
    return panel


def _write(panel: Tensor, digits: str, top: int, left: int) -> None:
    """Write a number in digits of two-pixel dots, as far as it fits."""
    for place, digit in enumerate(digits):
        for row, bits in enumerate(_FONT[digit]):
            for column in (column for column in range(3) if bits >> (2 - column) & 1):
                y, x = max(top, 0) + 2 * row, left + 8 * place + 2 * column
                panel[y : y + 2, x : x + 2] = torch.tensor(_BAR)
