"""The assembly of ``code_bits.py`` carried out in Python: every code becomes the number that it stands for."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the assembly is part of kernels, which need triton")

from outrider.models.gpu.code_bits import (
    ABOVE_ZERO,
    BYTES,
    E2M1,
    FIVE_BITS,
    FLOATS,
    FOUR_BITS,
    NIBBLES,
    ONES,
    SIX_BITS,
    table_code,
)
from outrider.models.packed import E2M1 as SMALL_FLOATS
from outrider.models.planes import together

ALL = range(256)


def _floats(word: int) -> list[float]:
    return [struct.unpack("<f", struct.pack("<I", (word >> shift & 0xFFFF) << 16))[0] for shift in (0, 16)]


def _word(numbers: list[float]) -> int:
    """Two numbers that a bfloat16 holds exactly."""
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    assert not any(each & 0xFFFF for each in bits), numbers
    return bits[0] >> 16 | bits[1]


def _permuted(first: int, second: int, places: int) -> int:
    numbers = (first | second << 32).to_bytes(8, "little")
    picked = [places >> 4 * at & 15 for at in range(4)]
    assert all(place < 8 for place in picked), "a place with its fourth bit set would copy a sign"
    return int.from_bytes(bytes(numbers[place] for place in picked), "little")


def _looked_up(first: int, second: int, third: int, table: int) -> int:
    given = [(first >> at & 1) << 2 | (second >> at & 1) << 1 | third >> at & 1 for at in range(32)]
    return sum((table >> place & 1) << at for at, place in enumerate(given))


def carried_out(code: str, inputs: dict[str, int], num_outputs: int) -> list[int]:
    """The registers of the results."""
    values = dict(inputs)

    def number(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else values[name]

    for line in re.findall(r"^\s*([a-z][\w.]+ .*);$", code, re.MULTILINE):
        name, rest = line.split(" ", 1)
        to, *operands = (part.strip() for part in rest.split(","))
        given = [number(operand) for operand in operands]
        match name:
            case "mov.b32":
                found = given[0]
            case "and.b32":
                found = given[0] & given[1]
            case "shl.b32":
                found = given[0] << given[1]
            case "shr.u32":
                found = given[0] >> given[1]
            case "prmt.b32":
                found = _permuted(*given)
            case "lop3.b32":
                found = _looked_up(*given)
            case "sub.bf16x2":
                found = _word([a - b for a, b in zip(*map(_floats, given), strict=True)])
            case "mul.bf16x2":
                found = _word([a * b for a, b in zip(*map(_floats, given), strict=True)])
            case _:
                raise AssertionError(f"unknown instruction {name}")
        values[to] = found & 0xFFFFFFFF
    return [values[f"${place}"] for place in range(num_outputs)]


def _halves(code: str, **inputs: int) -> tuple[list[float], list[float]]:
    """What the lower and the upper halves of all bytes become."""
    low, high = [], []
    for start in range(0, 256, 4):
        word = int.from_bytes(bytes(range(start, start + 4)), "little")
        found = carried_out(code, {"$4": word, **{f"${name[1:]}": value for name, value in inputs.items()}}, 4)
        numbers = [number for register in found for number in _floats(register)]
        low += numbers[:4]
        high += numbers[4:]
    return low, high


def _bytes(code: str) -> list[float]:
    words = [int.from_bytes(bytes(range(start, start + 4)), "little") for start in range(0, 256, 4)]
    return [number for word in words for register in carried_out(code, {"$2": word}, 2) for number in _floats(register)]


def test_halves_are_whole_numbers() -> None:
    assert _halves(NIBBLES.value) == ([(byte & 15) - 8 for byte in ALL], [(byte >> 4) - 8 for byte in ALL])


def test_halves_stay_128_too_large() -> None:
    assert _halves(FOUR_BITS.value) == ([(byte & 15) + 128 for byte in ALL], [(byte >> 4) + 128 for byte in ALL])
    assert [_floats(register) for register in carried_out(ONES.value, {}, 2)] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(("bits", "code"), [(1, FIVE_BITS), (2, SIX_BITS)])
def test_halves_have_more_bits_in_a_word_beside_them(bits: int, code: Any) -> None:
    """Where ``planes.together`` puts them. The kernel repeats the word for every byte."""
    draw = torch.Generator().manual_seed(bits)
    for _ in range(40):
        codes = torch.randint(16 << bits, (1, 32), generator=draw, dtype=torch.uint8)
        low, high = together(codes & 15, 4)[0].tolist(), together(codes >> 4, bits)[0].tolist()
        for start in range(0, 16, 4):
            word = int.from_bytes(bytes(high[start // 4 * bits : start // 4 * bits + bits]) * (4 // bits), "little")
            inputs = {"$4": int.from_bytes(bytes(low[start : start + 4]), "little"), "$5": word, "$6": word}
            found = [number - 128 for register in carried_out(code.value, inputs, 4) for number in _floats(register)]
            assert found == codes[0, [*range(start, start + 4), *range(16 + start, 20 + start)]].tolist()


def test_halves_less_a_zero() -> None:
    middle = _word([139.0, 139.0])
    assert _halves(ABOVE_ZERO.value, r5=middle, r6=middle)[0] == [(byte & 15) - 11 for byte in ALL]


def test_halves_are_small_floats() -> None:
    found = _halves(E2M1.value)
    assert found == ([SMALL_FLOATS[byte & 15] for byte in ALL], [SMALL_FLOATS[byte >> 4] for byte in ALL])
    assert [math.copysign(1, number) for number in found[0][:16]] == [1.0] * 8 + [-1.0] * 8


@pytest.mark.parametrize("seed", range(3))
def test_halves_are_places_in_a_table(seed: int) -> None:
    """Each number is rounded as PyTorch rounds it."""
    levels = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    rounded = levels.bfloat16().tolist()
    found = _halves(table_code(tuple(levels.tolist())))
    assert found == ([rounded[byte & 15] for byte in ALL], [rounded[byte >> 4] for byte in ALL])


def test_bytes_are_whole_numbers() -> None:
    assert _bytes(BYTES.value) == [byte - 256 if byte > 127 else byte for byte in ALL]


def test_bytes_are_floats() -> None:
    """All but the two codes that stand for no number."""
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    found = _bytes(FLOATS.value)
    assert [a == b for a, b in zip(found, wanted, strict=True)] == [byte & 127 != 127 for byte in ALL]
