"""Native calls for the sampler's random numbers and for the target's choices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64

import torch
from torch import Tensor

from outrider.core.rng import Chosen, Masks, Noise
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict
from outrider.models.native.structs import ChoicesStruct, ShapingStruct

_WALK_HEAD = 3
"""Numbers of a row before its nodes (``walk.hpp``)."""


def gumbel_stream(library: ctypes.CDLL, keys: Tensor, length: int) -> Tensor:
    """[..., length] standard Gumbel numbers in float32. They equal ``core.rng.gumbel_stream`` to within the last bit of a
    logarithm."""
    keys = keys.contiguous()
    numbers = torch.empty(*keys.shape, length)
    library.outrider_gumbel(ctypes.c_void_p(keys.data_ptr()), keys.numel(), length, ctypes.c_void_p(numbers.data_ptr()))
    return numbers


def choose(
    library: ctypes.CDLL, logits: Tensor, tempering: Tempering, *, noise: Noise, tree: TokenTree, start: int, masks: Masks
) -> Chosen:
    """The target's choices, as ``core.sampling.Law`` makes them with the numbers of ``gumbel_stream``, and the walks along them
    if they start at the root. A choice is -1 if PyTorch's rounding decides whether a cut keeps it."""
    logits, chosen = logits.contiguous(), torch.empty(logits.shape[:2], dtype=torch.int64)
    tokens, parents = tree.tokens.contiguous(), None if tree.is_chain else tree.parents.contiguous()
    batch_size, num_nodes, vocab_size = logits.shape
    shaping = ShapingStruct.of(tempering, vocab_size)
    call = ChoicesStruct(batch_size, tree.num_nodes, start, vocab_size, logits.data_ptr(), tokens.data_ptr())
    call.parents = None if parents is None else parents.data_ptr()
    call.shaping, call.out = addressof(shaping), chosen.data_ptr()
    if any(tempering.temperatures):
        call.seeds, call.positions = noise.seeds.data_ptr(), noise.positions.data_ptr()
    if masks:
        held = [masks.get((row, start + node)) for row in range(batch_size) for node in range(num_nodes)]
        pointers = (ctypes.c_void_p * len(held))(*(None if mask is None else mask.data_ptr() for mask in held))
        call.allowed = addressof(pointers)
    if start:
        return Chosen(chosen, library.outrider_choose(byref(call)))
    sizes, width = (c_int32 * batch_size)(*tree.sizes), _WALK_HEAD + num_nodes
    walks = (c_int64 * (batch_size * width))()
    call.sizes, call.walks = addressof(sizes), addressof(walks)
    num_open = library.outrider_choose(byref(call))
    rows = None if num_open else [_verdict(walks[begin : begin + width]) for begin in range(0, len(walks), width)]
    return Chosen(chosen, num_open, rows)


def _verdict(walk: Sequence[int]) -> RowVerdict:
    num_accepted, is_rejected, token, *nodes = walk
    return RowVerdict(tuple(nodes[:num_accepted]), token, bool(is_rejected))
