"""An image as the tower takes it: read, checked and put through the model's own image processor.

An image is a path, bytes, a PIL image, or the processor's output itself (a mapping with ``pixel_values``). Its size is checked
before it is decoded, so a huge image costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OptionError, OutriderError, RequestError

_INSTALL = "install it: pip install 'outrider[vlm]'"


@dataclass(frozen=True)
class ImageLimits:
    """Limits on encoded images, checked before an image is decoded."""

    max_bytes: int = 20_000_000
    """Largest encoded image (PNG, JPEG ...) in bytes."""
    max_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise OptionError(f"{name} = {value} is not valid; use at least 1")


@dataclass(frozen=True, eq=False)
class Pixels:
    """One image, processed."""

    inputs: Mapping[str, Tensor]
    """The vision tower's arguments by name."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles into which the image was cut; (0, 0) if it is whole."""

    @property
    def key(self) -> bytes:
        """A key that is equal for equal pixels only."""
        digest = hashlib.sha256(repr(self.tiles).encode())
        for name in sorted(self.inputs):
            tensor = self.inputs[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along height and width, if the image processor reports them."""
        if "image_grid_thw" not in self.inputs:
            raise RequestError("the processed image has no image_grid_thw; give all that the model's image processor returns")
        time, height, width = (int(size) for size in self.inputs["image_grid_thw"].flatten())
        if time != 1:
            raise RequestError(f"image_grid_thw has {time} frames; give still images, one frame each")
        return height, width


Process = Callable[[Any], Mapping[str, Any]]
"""A model's image processor: a PIL image to arrays by name."""


def pixels_of(image: Any, process: Process, limits: ImageLimits) -> Pixels:
    """An image in any form that a user may give, processed for the model."""
    if isinstance(image, Mapping):
        return _processed(image)
    found = opened(image, limits)
    try:
        made = process(found)
    except OutriderError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        what = f"the image of {found.size[0]} x {found.size[1]} pixels cannot be prepared for this model"
        raise RequestError(f"{what} ({error}); try another size, or save it as PNG") from None
    return _processed(made)


def _processed(made: Mapping[str, Any]) -> Pixels:
    if "pixel_values" not in made:
        names = ", ".join(map(str, made)) or "nothing"
        raise RequestError(f"a processed image needs pixel_values, and this one has {names}; give a path, bytes or a PIL image")
    given = {name: value for name, value in made.items() if name not in ("rows", "cols") and value is not None}
    inputs = {name: torch.as_tensor(value) for name, value in given.items()}
    tiles = (_first(made.get("rows")), _first(made.get("cols")))
    return Pixels(inputs, tiles)


def _first(value: Any) -> int:
    """The number inside nested one-element lists; 0 if there is none."""
    while isinstance(value, list | tuple):
        value = value[0] if value else 0
    return int(value or 0)


def opened(image: Any, limits: ImageLimits) -> Any:
    """A PIL image in RGB. A PIL image that the caller gives is accepted at any size."""
    try:
        from PIL import Image, UnidentifiedImageError  # pyright: ignore[reportMissingImports] - an extra, [vlm]
    except ImportError:
        raise RequestError(f"reading images needs Pillow, which is not here; {_INSTALL}") from None
    if not isinstance(image, Image.Image):
        data = _bytes_of(image, limits)
        try:
            image = Image.open(BytesIO(data))
        except UnidentifiedImageError:
            raise RequestError(f"{_words(data)} cannot be read as an image; send a whole PNG, JPEG or WebP file") from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise RequestError(f"the image cannot be opened ({error}); send a whole PNG, JPEG or WebP file") from None
        _check_pixels(image.size, limits)
    width, height = image.size
    if not width or not height:
        raise RequestError(f"the image has {width} x {height} pixels; give one with at least one pixel")
    try:
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(f"the image is broken ({error}); the file may be cut off: send it whole") from None


def _bytes_of(image: Any, limits: ImageLimits) -> bytes:
    if isinstance(image, str | PathLike):
        return _file(Path(fspath(image)).expanduser(), limits)
    if not isinstance(image, bytes | bytearray | memoryview):
        raise RequestError(f"{type(image).__name__} is not an image; give a path, the bytes of a file, or a PIL image")
    _check_bytes(len(image), limits)
    return bytes(image)


def _file(path: Path, limits: ImageLimits) -> bytes:
    if not path.is_file():
        is_address = str(path).startswith(("http:", "https:"))
        hint = "fetch it first, addresses are not opened here" if is_address else "give the path of a PNG, JPEG or WebP file"
        raise RequestError(f"{path}: no such image file; {hint}")
    _check_bytes(path.stat().st_size, limits)
    return path.read_bytes()


def _check_bytes(size: int, limits: ImageLimits) -> None:
    if size > limits.max_bytes:
        raise RequestError(f"the image has {size} bytes, and at most {limits.max_bytes} are taken; send a smaller file")


def _check_pixels(size: tuple[int, int], limits: ImageLimits) -> None:
    count = size[0] * size[1]
    if count > limits.max_pixels:
        what = f"the image has {size[0]} x {size[1]} = {count} pixels, and at most {limits.max_pixels} are taken"
        raise RequestError(f"{what}; make it smaller before you send it")


def _words(data: bytes) -> str:
    return f"the image, {len(data)} bytes," if data else "an empty image"
