"""PNG files without a library: eight bits per channel, one filter, compressed by zlib (ISO/IEC 15948)."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from torch import Tensor

from outrider.core.errors import OptionError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2}
"""PNG colour types of grey and RGB images, by number of channels."""


def png_bytes(pixels: Tensor) -> bytes:
    """The PNG file of an image [height, width, 1 or 3] in 0 .. 1."""
    height, width, channels = pixels.shape
    rows = (pixels.clamp(0, 1) * 255).round().byte().reshape(height, width * channels).numpy()
    raw = b"".join(b"\0" + row.tobytes() for row in rows)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")


def write_png(path: Path, pixels: Tensor) -> None:
    """Write an image; its folder must exist."""
    try:
        path.write_bytes(png_bytes(pixels))
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error.strerror}); give a file in a folder that exists") from error


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
