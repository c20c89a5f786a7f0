"""Matrices in the storage types of GGUF, to the nearest: what a quantiser writes, from the formats' definitions alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.gguf.quants import STORAGE_TYPES

CODES = {storage.name: code for code, storage in STORAGE_TYPES.items()}
WIDTHS = {storage.name: storage.block_len for storage in STORAGE_TYPES.values()}


def quantised(weights: Tensor, name: str) -> tuple[int, tuple[int, ...], bytes]:
    """The matrix for ``write_gguf``."""
    blocks = _WRITERS[name](weights.reshape(-1, WIDTHS[name]).double())
    return CODES[name], tuple(weights.shape), blocks.numpy().tobytes()


def _halves(*numbers: Tensor) -> list[Tensor]:
    return [number.half().contiguous().view(torch.uint8) for number in numbers]


def _whole(numbers: Tensor, most: int) -> Tensor:
    return numbers.nan_to_num().round().clamp(0, most).to(torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    """The first half of the last dimension in the low halves of bytes, the second in the high ones."""
    low, high = (q & 15).chunk(2, -1)
    return low | high << 4


def _bits(ones: Tensor) -> Tensor:
    """[..., 8, n] of 0 and 1 to [..., n] bytes."""
    return (ones << torch.arange(8, dtype=torch.uint8)[:, None]).sum(-2).to(torch.uint8)


def _plain(bits: int) -> Callable[[Tensor], Tensor]:
    """Q4_0, Q5_0."""

    def write(blocks: Tensor) -> Tensor:
        scale = (blocks.abs().amax(1, keepdim=True) / -(2 ** (bits - 1))).half().double()
        q = _whole(blocks / scale + 2 ** (bits - 1), 2**bits - 1)
        return torch.cat([*_halves(scale), *_fifth(q, bits), _nibbles(q)], 1)

    return write


def _with_offset(bits: int) -> Callable[[Tensor], Tensor]:
    """Q4_1, Q5_1."""

    def write(blocks: Tensor) -> Tensor:
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        scale, offset = ((high - low) / (2**bits - 1)).half().double(), low.half().double()
        q = _whole((blocks - offset) / scale, 2**bits - 1)
        return torch.cat([*_halves(scale, offset), *_fifth(q, bits), _nibbles(q)], 1)

    return write


def _fifth(q: Tensor, bits: int) -> list[Tensor]:
    return [_bits((q >> 4).view(-1, 4, 8).transpose(1, 2))] if bits == 5 else []


def _q8_0(blocks: Tensor) -> Tensor:
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().double()
    q = (blocks / scale).nan_to_num().round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat([*_halves(scale), q], 1)


def _six_bits(scales: Tensor, offsets: Tensor) -> Tensor:
    """Eight and eight numbers of 6 bits in twelve bytes."""
    (s, high_s), (m, high_m) = scales.chunk(2, 1), offsets.chunk(2, 1)
    return torch.cat([s | high_s >> 4 << 6, m | high_m >> 4 << 6, (high_s & 15) | (high_m & 15) << 4], 1)


def _k_with_offsets(bits: int) -> Callable[[Tensor], Tensor]:
    """Q4_K, Q5_K."""

    def write(blocks: Tensor) -> Tensor:
        groups = blocks.view(-1, 8, 32)
        low = groups.amin(-1).clamp(max=0)
        scale = (groups.amax(-1) - low) / (2**bits - 1)
        d, dmin = ((x.amax(1, keepdim=True) / 63).half().double() for x in (scale, -low))
        s, m = _whole(scale / d, 63), _whole(-low / dmin, 63)
        q = _whole((groups + (dmin * m)[..., None]) / (d * s)[..., None], 2**bits - 1)
        fifth = [_bits(q >> 4)] if bits == 5 else []
        return torch.cat([*_halves(d, dmin), _six_bits(s, m), *fifth, _nibbles(q.view(-1, 4, 64)).flatten(1)], 1)

    return write


def _q6_k(blocks: Tensor) -> Tensor:
    groups = blocks.view(-1, 16, 16)
    scale = groups.abs().amax(-1) / -32
    d = (scale.abs().amax(1, keepdim=True) / 127).half().double()
    s = (scale / d).nan_to_num().round().clamp(-128, 127).to(torch.int8)
    q = _whole(groups / (d * s)[..., None] + 32, 63).view(-1, 2, 128)
    pairs = (q >> 4).view(-1, 2, 4, 32) << 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    return torch.cat([_nibbles(q).flatten(1), pairs.sum(2).to(torch.uint8).flatten(1), s.view(torch.uint8), *_halves(d)], 1)


_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float64)


def _nearest_level(numbers: Tensor) -> Tensor:
    """The codes of the levels that are nearest."""
    return (numbers.nan_to_num()[..., None] - _LEVELS).abs().argmin(-1).to(torch.uint8)


def _iq4_nl(blocks: Tensor) -> Tensor:
    scale = (blocks.abs().amax(1, keepdim=True) / -127).half().double()
    return torch.cat([*_halves(scale), _nibbles(_nearest_level(blocks / scale))], 1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    groups = blocks.view(-1, 8, 32)
    scale = groups.abs().amax(-1) / -127
    d = (scale.abs().amax(1, keepdim=True) / 32).half().double()
    s = (scale / d).nan_to_num().round().clamp(-32, 31)
    q = _nearest_level(groups / (d * s)[..., None])
    raised = (s + 32).to(torch.uint8)
    low, upper = raised & 15, raised.int() >> 4
    high = (upper << 2 * torch.arange(8)).sum(1, keepdim=True).to(torch.int16).view(torch.uint8)
    return torch.cat([*_halves(d), high, low[:, ::2] | low[:, 1::2] << 4, _nibbles(q).flatten(1)], 1)


_SMALL_FLOATS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float64)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = (blocks.abs().amax(1, keepdim=True).log2().floor() + 125).clamp(0, 254)
    codes = (blocks / 2 ** (exponent - 128)).unsqueeze(-1).sub(_SMALL_FLOATS).abs().argmin(-1).to(torch.uint8)
    return torch.cat([exponent.to(torch.uint8), _nibbles(codes)], 1)


_WRITERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _plain(4),
    "Q4_1": _with_offset(4),
    "Q5_0": _plain(5),
    "Q5_1": _with_offset(5),
    "Q4_K": _k_with_offsets(4),
    "Q5_K": _k_with_offsets(5),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def assert_rounded_alike(stored: Target, reference: Target, exact: Target, *, most: float) -> None:
    """The stored model scores as the reference does, which rounds inputs, and not as the exact one: that is up to ``most``
    away. Where two sums differ in the last bit, an input may be rounded to the other side; in most rows none is."""
    tree = TokenTree.of_rows([([row, row + 30, row + 60], [-1, 0, 0]) for row in range(20)])
    found, wanted, unrounded = (model.score(tree, model.new_cache(20)).logits for model in (stored, reference, exact))
    apart = (found - wanted).flatten(1).norm(dim=1) / (unrounded - wanted).flatten(1).norm(dim=1)
    assert apart.median() < 0.01
    assert 1e-4 < (unrounded - wanted).norm() / wanted.norm() < most
