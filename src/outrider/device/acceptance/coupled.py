"""The coupled walk on the device, and its commit: the accepted branch moves down next to the committed tokens.

The walk starts at the root and follows the child that holds the target's own choice. If there is no such child, the choice ends
the round. A chain is a tree in which every node has one child. Then the keys and values of the accepted nodes move from their
places in the tree to their places in the text, in all layers at once. The oracles are the coupled rule and ``cache/slots.py``.

    slot(base + i) <- slot(base + path[i]),      i = 1 .. accepted,      base: the root's slot
"""

# ruff: noqa: N803 - kernels write compile-time numbers in capitals
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.device_round import Frame
from outrider.device.sampling.choose import Bests, choice_of
from outrider.models.attention.tree_tiles import Rows, slots_at

RING = 4
"""Number of rounds whose results are kept for the host."""
NOTE = 4
"""Length of a note before its choices: emitted, guessed, agreed, and whether a guess was rejected."""


def chain_parents(batch_size: int, num_nodes: int, device: torch.device) -> Tensor:
    """[B, N] parents of chains."""
    return torch.arange(-1, num_nodes - 1, device=device).expand(batch_size, -1).contiguous()


def walk_and_commit(bests: Bests, nodes: Tensor, frame: Frame, *, parents: Tensor, ring: Tensor, rounds: Tensor) -> Tensor:
    """Walk every row's tree ([B, N] tokens, -1 for no guess, and parents), and append the emitted tokens to the frame. Write a
    note to ``ring`` [RING, B, NOTE + D + 1] at the row's round number ``rounds`` [B]. A note holds the numbers of emitted
    tokens, of guesses and of agreeing guesses, whether a guess was rejected, and the choices. Returns the paths [B, 2 + D]: the
    root's slot, the number of accepted nodes, and those nodes."""
    values, tokens = bests.values, bests.tokens
    batch_size, num_nodes, num_blocks = values.shape
    num_steps = ring.shape[2] - NOTE
    path = torch.empty(batch_size, 1 + num_steps, dtype=torch.int64, device=nodes.device)
    counts = tokens if frame.shaping is None else frame.shaping.counts
    _walk_and_commit[(batch_size,)](
        values, tokens, nodes, parents, counts, frame.tokens, frame.lengths, frame.limits, ring, rounds, path,
        num_nodes, num_steps, num_blocks, frame.capacity, counts.shape[-1], COUNTS=bool(frame.stages),
        NODES=triton.next_power_of_2(num_nodes), PADDED=triton.next_power_of_2(num_blocks), RINGS=RING, HEAD=NOTE, num_warps=1,
    )  # fmt: skip
    return path


@triton.jit(do_not_specialize=["num_nodes", "num_steps"])
def _walk_and_commit(
    values, best_tokens, nodes, parents, counts, tokens, lengths, limits, ring, rounds, path,
    num_nodes, num_steps, num_blocks, capacity, vocab_size, COUNTS: tl.constexpr,
    NODES: tl.constexpr, PADDED: tl.constexpr, RINGS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    room = tl.maximum(tl.load(limits + row) - length, 0)
    number = tl.load(rounds + row)
    note = ring + (number % RINGS * tl.num_programs(0) + row) * (HEAD + num_steps)
    all_nodes = tl.arange(0, NODES)
    inside = all_nodes < num_nodes
    guesses = tl.load(nodes + row * num_nodes + all_nodes, mask=inside, other=-1)
    above = tl.load(parents + row * num_nodes + all_nodes, mask=inside & (guesses >= 0), other=-1)
    node = tl.full((), 0, tl.int64)
    goes_on = tl.full((), 1, tl.int64)
    accepted = tl.full((), 0, tl.int64)
    emitted = tl.full((), 0, tl.int64)
    rejected = tl.full((), 0, tl.int64)
    for step in range(num_steps):
        choice = choice_of(values, best_tokens, row * num_nodes + node, num_blocks, PADDED)
        takes = (goes_on == 1) & (emitted < room)
        tl.store(tokens + row * capacity + length + step, choice, mask=takes)
        tl.store(note + HEAD + step, choice)
        if COUNTS:  # what penalties of later rounds look at
            tl.atomic_add(counts + row * vocab_size + choice, 1, mask=takes)
        emitted += takes.to(tl.int64)
        below = above == node
        child = tl.min(tl.where(below & (guesses == choice), all_nodes, NODES), 0).to(tl.int64)
        found = goes_on * (child < NODES).to(tl.int64)
        rejected += goes_on * (1 - found) * tl.max(below.to(tl.int64), 0)
        node = tl.where(found == 1, child, node)
        tl.store(path + row * (1 + num_steps) + 2 + accepted, node, mask=found == 1)
        accepted += found
        goes_on = found
    tl.store(path + row * (1 + num_steps), length - 1)
    tl.store(path + row * (1 + num_steps) + 1, accepted)
    tl.store(note, emitted)
    tl.store(note + 1, tl.sum(((all_nodes > 0) & (guesses >= 0)).to(tl.int64), 0))
    tl.store(note + 2, accepted)
    tl.store(note + 3, rejected)
    tl.store(lengths + row, length + emitted)
    tl.store(rounds + row, number + 1)


def move_path(block: Tensor, rows: Rows, path: Tensor) -> None:
    """Move the nodes of every row's ``path`` next to its root in ``block`` [L, sides, R, Hkv, S, D] of rows or pages."""
    num_layers, sides, num_places, num_heads, capacity, head_dim = block.shape
    _move_path[(num_layers * sides * num_heads, len(path))](
        block, rows.places, path, num_places, capacity, rows.places.shape[1] if rows.page_len else 0, path.shape[1],
        HEADS=num_heads, D=head_dim, BLOCK=triton.next_power_of_2(head_dim), PAGED=rows.page_len > 0, num_warps=1,
    )  # fmt: skip


@triton.jit
def _move_path(
    block, places, path, num_places, capacity, num_pages, width,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.program_id(1)
    base = tl.load(path + row * width)
    dims = tl.arange(0, BLOCK)
    memory = block + part.to(tl.int64) * num_places * HEADS * capacity * D + dims
    for index in range(tl.load(path + row * width + 1)):
        node = tl.load(path + row * width + 2 + index)
        if node != index + 1:
            source = slots_at(places, row, head, base + node, True, capacity, num_pages, HEADS, PAGED)
            to = slots_at(places, row, head, base + index + 1, True, capacity, num_pages, HEADS, PAGED)
            tl.store(memory + to * D, tl.load(memory + source * D, mask=dims < D), mask=dims < D)
