"""Tokens that grammars forbid, on the device: one bit a token, at every node of the slots that have a grammar.

The host computes the masks during the pass and packs eight tokens into a byte, lowest bit first.
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_sampling import Use

_BLOCK = 1024
_GRAMMAR = tl.constexpr(int(Use.GRAMMAR))


def mask_bytes(vocab_size: int) -> int:
    """Bytes of one node's mask."""
    return -(-vocab_size // 8)


def forbid(logits: Tensor, masks: Tensor, uses: Tensor, *, vocab_size: int) -> None:
    """Give no probability to the tokens that ``masks`` [B, N, bytes] leave out, in [B, N, V'] logits of slots that have a
    grammar (``uses`` [B])."""
    batch_size, num_nodes, width = logits.shape
    _forbid[(triton.cdiv(vocab_size, _BLOCK), num_nodes, batch_size)](
        logits, masks, uses, width, masks.shape[2], vocab_size, BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _forbid(logits, masks, uses, width, num_bytes, vocab_size, BLOCK: tl.constexpr):
    node = tl.program_id(1)
    row = tl.program_id(2)
    if tl.load(uses + row) & _GRAMMAR:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        flat = (row * tl.num_programs(1) + node).to(tl.int64)
        byte = tl.load(masks + flat * num_bytes + token // 8, mask=inside, other=255).to(tl.int32)
        forbidden = inside & (((byte >> (token % 8)) & 1) == 0)
        tl.store(logits + flat * width + token, float("-inf"), mask=forbidden)
