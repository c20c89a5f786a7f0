"""Native calls for the sampler's random numbers and for the target's choices."""

from __future__ import annotations

import ctypes
from ctypes import addressof, byref

import torch
from torch import Tensor

from outrider.core.rng import Masks, Noise
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.native.structs import ChoicesStruct, ShapingStruct


def gumbel_stream(library: ctypes.CDLL, keys: Tensor, length: int) -> Tensor:
    """[..., length] standard Gumbel numbers in float32. They equal ``core.rng.gumbel_stream`` to within the last bit of a
    logarithm."""
    keys = keys.contiguous()
    numbers = torch.empty(*keys.shape, length)
    library.outrider_gumbel(ctypes.c_void_p(keys.data_ptr()), keys.numel(), length, ctypes.c_void_p(numbers.data_ptr()))
    return numbers


def choose(
    library: ctypes.CDLL, logits: Tensor, tempering: Tempering, *, noise: Noise, tree: TokenTree, start: int, masks: Masks
) -> tuple[Tensor, int]:
    """[B, M] the target's choices, as ``core.sampling.Law`` makes them with the numbers of ``gumbel_stream``. A choice is -1 if
    PyTorch's rounding decides whether a cut keeps it. Also returns the number of such choices."""
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
    return chosen, library.outrider_choose(byref(call))
