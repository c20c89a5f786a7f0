"""Seconds of a target pass on this machine, by the number of nodes, the context and the batch.

Speculation pays because a pass over several nodes costs little more than a pass over one. How little depends on the machine. It
is measured here on chains after contexts of random tokens. Sizes take turns, so that drift does not bend the curve, and each
figure is the median of its repeats.
"""

from __future__ import annotations

import bisect
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.core.interfaces import Cache, Target
from outrider.core.tree import TokenTree

Middle = Callable[[Sequence[float]], float]
"""Summary of several timings: the median, or the mean for predictions of sums."""
Clock = Callable[[], float]
"""A clock in seconds: ``time.perf_counter``, or ``time.process_time`` (one thread) if other programs share the machine."""
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class PassCurve:
    """Seconds of a pass by number of nodes per row, at one context length and batch size."""

    context: int
    batch_size: int
    nodes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_nodes: float) -> float:
        """Seconds at any size. Between measured sizes the curve is linear. Beyond the last it continues the last piece, and
        never falls."""
        if num_nodes <= self.nodes[0] or len(self.nodes) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.nodes, num_nodes), len(self.nodes) - 1)
        (left_at, left), (right_at, end) = ((self.nodes[i], self.seconds[i]) for i in (right - 1, right))
        slope = (end - left) / (right_at - left_at)
        return end + max(slope, 0.0) * (num_nodes - right_at) if num_nodes > right_at else left + slope * (num_nodes - left_at)

    def to_json(self) -> dict[str, Any]:
        return {"context": self.context, "batch_size": self.batch_size, "nodes": self.nodes, "seconds": self.seconds}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PassCurve:
        return PassCurve(data["context"], data["batch_size"], tuple(data["nodes"]), tuple(data["seconds"]))


def measure_curves(
    target: Target,
    *,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = (64,),
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 9,
    middle: Middle = statistics.median,
    clock: Clock = time.perf_counter,
) -> list[PassCurve]:
    """The curves of every combination of context and batch size that fits the model."""
    found: list[PassCurve] = []
    for batch_size in batch_sizes:
        for context in contexts:
            fitting = [size for size in nodes if context + size < target.max_len]
            if fitting:
                found.append(
                    _curve(target, fitting, context=context, batch_size=batch_size, timing=Timing(repeats, middle, clock))
                )
    return found


@dataclass(frozen=True)
class Timing:
    """Settings of a timed pass."""

    repeats: int
    middle: Middle
    clock: Clock


def _curve(target: Target, nodes: Sequence[int], *, context: int, batch_size: int, timing: Timing) -> PassCurve:
    chance = random.Random(0)
    cache = target.new_cache(batch_size)
    target.prefill([[chance.randrange(target.vocab_size) for _ in range(context)] for _ in range(batch_size)], cache)
    trees = {size: _tree(target, batch_size, size, chance) for size in nodes}
    times: dict[int, list[float]] = {size: [] for size in nodes}
    for repeat in range(timing.repeats + 1):
        order = list(nodes)
        chance.shuffle(order)
        for size in order:
            seconds = pass_seconds(target, trees[size], cache, clock=timing.clock)
            if repeat:  # the first of each size warms up
                times[size].append(seconds)
    return PassCurve(context, batch_size, tuple(nodes), tuple(timing.middle(times[size]) for size in nodes))


def _tree(target: Target, batch_size: int, size: int, chance: random.Random) -> TokenTree:
    rows = [[chance.randrange(target.vocab_size) for _ in range(size)] for _ in range(batch_size)]
    return TokenTree.chain(torch.tensor(rows, device=target.device))


def pass_seconds(target: Target, tree: TokenTree, cache: Cache, *, clock: Clock = time.perf_counter) -> float:
    """Seconds of one pass. The cache stays as before, since nothing is committed."""
    _settle(target)
    began = clock()
    target.score(tree, cache)
    _settle(target)
    return clock() - began


def _settle(target: Target) -> None:
    """Wait for the device."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
