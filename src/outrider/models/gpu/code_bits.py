"""Assembly that makes numbers from the bits of their codes, four bytes at a time.

Conversion is expensive: the compiler's way takes longer than reading 16 bits would. A bfloat16 has 8 bits of exponent and 7
after the point, so 0x4300 | n is 128 + n for n below 128. A nibble is (128 + n) - 136; a byte is (128 + its lower seven bits)
- 128, or - 256 where its sign is set. The bits of small floats are moved to their places in a bfloat16, and a power of two
corrects the bias of the exponent. A table of sixteen numbers is held in registers, from which bytes are picked.

Halves of bytes give four registers of two numbers, the low halves first; whole bytes give two.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

import triton.language as tl


def _code(*lines: str) -> str:
    return "\n    ".join(["{", *lines]) + "\n    }"


_HALVES = (
    "prmt.b32 a, $4, 0, 0x4140;",
    "prmt.b32 b, $4, 0, 0x4342;",
    "lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;",
    "lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;",
    "shr.u32 a, a, 4;",
    "shr.u32 b, b, 4;",
    "lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;",
    "lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;",
)
"""The halves n of four bytes as 128 + n."""


def nibble_code(number: str, *, given: str = "") -> str:
    """The halves n of four bytes as 128 + n, less what ``number`` holds twice."""
    less = (f"sub.bf16x2 ${place}, ${place}, {number};" for place in range(4))
    return _code(".reg .b32 a, b, c;", *([given] if given else []), *_HALVES, *less)


def _upper_code(bits: int) -> str:
    """The halves of four bytes with ``bits`` more bits above them, as 128 + n. A word ($5) has those of both halves of the
    first byte, then of the second, and so on. Those of two bytes are moved to the places from 4 on, the low half's first."""
    if bits == 2:
        moves = ["shl.b32 t, $5, 4;", "prmt.b32 c, t, $5, 0x4400;", "prmt.b32 d, t, $5, 0x5511;"]
    else:
        moves = ["shl.b32 t, $5, 4;", "shl.b32 u, $5, 2;", "prmt.b32 c, t, u, 0x4400;"]
        moves += ["shr.u32 u, $5, 2;", "prmt.b32 d, $5, u, 0x4400;"]
    mask = f"0x{0x00100010 * ((1 << bits) - 1):08X}"
    added = [f"lop3.b32 $0, c, {mask}, $0, 0xEA;", f"lop3.b32 $1, d, {mask}, $1, 0xEA;"]
    added += [f"shr.u32 c, c, {bits};", f"shr.u32 d, d, {bits};"]
    added += [f"lop3.b32 $2, c, {mask}, $2, 0xEA;", f"lop3.b32 $3, d, {mask}, $3, 0xEA;"]
    return _code(".reg .b32 a, b, c, d, t, u;", *moves, *_HALVES, *added)


def _e2m1_code() -> str:
    """The halves' magnitudes and signs where a bfloat16 has them, times 2^126: its exponent counts from 127, not from 1."""
    halves = [(source, place) for place in (6, 2) for source in "ab"]
    moves = [
        line
        for number, (source, place) in enumerate(halves)
        for line in (
            f"shl.b32 t, {source}, {place};",
            f"shl.b32 s, {source}, {place + 6};",
            "and.b32 t, t, 0x01C001C0;",
            f"lop3.b32 ${number}, s, 0x80008000, t, 0xEA;",
        )
    ]
    taken = [f"prmt.b32 {name}, $4, 0, 0x{order};" for name, order in (("a", 4140), ("b", 4342))]
    scaled = [f"mul.bf16x2 ${number}, ${number}, c;" for number in range(4)]
    return _code(".reg .b32 a, b, c, s, t;", "mov.b32 c, 0x7E807E80;", *taken, *moves, *scaled)


@lru_cache(maxsize=32)
def table_code(levels: tuple[float, ...]) -> str:
    """The numbers that the halves of four bytes have in a table of sixteen, each rounded once.

    ``prmt`` picks four of eight bytes, by four places of 3 bits. So bytes are picked separately from the first and from the
    last eight numbers, and an index's fourth bit says which pick counts.
    """
    rounded = [_bfloat16(level) for level in levels]
    words = {
        (upper, start): _word(number >> 8 if upper else number & 255 for number in rounded[start : start + 4])
        for upper in (False, True)
        for start in (0, 4, 8, 12)
    }
    parts = [".reg .b32 p, f, g, m, l, u;", "and.b32 p, $4, 0x77777777;", "shr.u32 f, $4, 3;", "and.b32 f, f, 0x11111111;"]
    for pair in range(2):
        parts += ["shr.u32 p, p, 16;", "shr.u32 f, f, 16;"] if pair else []
        parts.append("prmt.b32 m, 0x0000FF00, 0, f;")
        for name, upper in (("l", False), ("u", True)):
            parts += [
                f"prmt.b32 {name}, {words[upper, 0]}, {words[upper, 4]}, p;",
                f"prmt.b32 g, {words[upper, 8]}, {words[upper, 12]}, p;",
                f"lop3.b32 {name}, m, g, {name}, 0xCA;",
            ]
        parts += [f"prmt.b32 ${pair}, l, u, 0x6240;", f"prmt.b32 ${pair + 2}, l, u, 0x7351;"]
    return _code(*parts)


def _word(four: Iterable[int]) -> str:
    """Four bytes, the lowest first."""
    return f"0x{int.from_bytes(four, 'little'):08X}"


def _bfloat16(number: float) -> int:
    """The bits of a number as bfloat16, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


NIBBLES = tl.constexpr(nibble_code("c", given="mov.b32 c, 0x43084308;"))
"""Halves less 8."""
ABOVE_ZERO = tl.constexpr(nibble_code("$5"))
"""Halves minus a number of each row: 136 plus the row's zero point. $5 and $6 hold it twice each."""
E2M1 = tl.constexpr(_e2m1_code())
"""Halves that are e2m1 floats."""
BYTES = tl.constexpr(
    _code(
        ".reg .b32 a, b, c, d;",
        "prmt.b32 a, $2, 0, 0x4140;",
        "prmt.b32 b, $2, 0, 0x4342;",
        "lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;",
        "lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;",
        "lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;",
        "lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;",
        "sub.bf16x2 $0, a, c;",
        "sub.bf16x2 $1, b, d;",
    )
)
"""Bytes that are signed whole numbers. The number subtracted is 0x4300 with the sign bit set accordingly."""
FLOATS = tl.constexpr(
    _code(
        ".reg .b32 a, b, c, d, e;",
        "mov.b32 e, 0x7B807B80;",
        "prmt.b32 a, $2, 0, 0x1404;",
        "prmt.b32 b, $2, 0, 0x3424;",
        "and.b32 c, a, 0x80008000;",
        "and.b32 d, b, 0x80008000;",
        "shr.u32 a, a, 4;",
        "shr.u32 b, b, 4;",
        "lop3.b32 a, a, 0x07F007F0, c, 0xEA;",
        "lop3.b32 b, b, 0x07F007F0, d, 0xEA;",
        "mul.bf16x2 $0, a, e;",
        "mul.bf16x2 $1, b, e;",
    )
)
"""Bytes that are e4m3 floats: their bits where a bfloat16 has them, times 2^120, since its exponent counts from 127, not 7."""
FOUR_BITS = tl.constexpr(_code(".reg .b32 a, b;", *_HALVES))
"""Halves plus 128."""
FIVE_BITS, SIX_BITS = tl.constexpr(_upper_code(1)), tl.constexpr(_upper_code(2))
"""Halves with one or two more bits, plus 128. $5 is the byte, or the two bytes, that have the upper bits of all eight."""
ONES = tl.constexpr(_code("mov.b32 $0, 0x3F803F80;", "mov.b32 $1, 0x3F803F80;"))
"""The number 1 for each byte."""
