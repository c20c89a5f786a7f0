"""The simulator: predicts speed from measured costs and acceptance, for lengths, models and clusters that were not measured.

A round of K guesses costs a draft, a pass over K + 1 nodes and the host's work. It emits one token more than it accepts, which
depends on the acceptance per depth. Texts end, so the last rounds are cut short. Therefore the expected time of a text of n
tokens is a recursion over the tokens of each round. Costs are measured curves. For other hardware they come from a roofline:
the larger of the times for memory and for arithmetic, plus a latency per layer. Weights divided among devices add a latency per
all-reduce.

    T(n) = cost(k) + sum_j P(j accepted of k) T(n - j - 1),    k = min(K, n - 1);       speed = n / T(n)
           + P(k accepted of k) read,    read: the draft has not read its last guess, so it has one more token to read
    pass(nodes) = max((weights + B context kv) / bandwidth, 2 params B nodes / flops) / devices + layers (latency + 2 reduce)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from outrider.core.errors import OptionError, nearest

Cost = Callable[[int], float]
"""Seconds of a round that drafts so many guesses."""


def accepted_law(by_depth: Sequence[float], length: int) -> list[float]:
    """Probabilities that 0, 1, .. ``length`` guesses are accepted. Depths beyond the measured ones keep the last rate."""
    rates = [by_depth[min(depth, len(by_depth) - 1)] if by_depth else 0.0 for depth in range(length)]
    law, reach = [], 1.0
    for rate in rates:
        law.append(reach * (1 - rate))
        reach *= rate
    return [*law, reach]


def expected_seconds(num_tokens: int, length: int, by_depth: Sequence[float], cost: Cost, *, read: float = 0.0) -> float:
    """T(n). ``read`` are the additional seconds of the first draft pass of a round in which it reads two tokens."""
    times = [0.0]
    laws = [accepted_law(by_depth, k) for k in range(length + 1)]
    costs = [cost(k) for k in range(length + 1)]
    for left in range(1, num_tokens + 1):
        k = min(length, left - 1)
        behind = read * laws[k][-1] if 0 < k < left - 2 else 0.0  # only where another round drafts
        times.append(costs[k] + behind + sum(chance * times[left - j - 1] for j, chance in enumerate(laws[k])))
    return times[num_tokens]


def predicted_speed(num_tokens: int, length: int, by_depth: Sequence[float], cost: Cost, *, read: float = 0.0) -> float:
    """Tokens per second of texts of ``num_tokens`` tokens."""
    return num_tokens / expected_seconds(num_tokens, length, by_depth, cost, read=read)


def tokens_per_pass(by_depth: Sequence[float], length: int) -> float:
    """1 + expected accepted guesses, in the middle of a long text."""
    return 1 + sum(j * chance for j, chance in enumerate(accepted_law(by_depth, length)))


@dataclass(frozen=True)
class Hardware:
    """One device by its data sheet, and the share of it that real code reaches."""

    name: str
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense 16-bit operations per second."""
    layer_latency: float = 4e-6
    """Seconds per layer for launches and barriers inside a CUDA graph."""
    reduce_latency: float = 8e-6
    """Seconds of an all-reduce of a few rows among devices of one node."""
    efficiency: float = 0.8
    """Share of the bandwidth and of the arithmetic that is reached."""


HARDWARE = {
    "a100": Hardware("a100", 2.0e12, 312e12),
    "h100": Hardware("h100", 3.35e12, 989e12),
    "h200": Hardware("h200", 4.8e12, 989e12),
    "b200": Hardware("b200", 8.0e12, 2250e12),
    "l4": Hardware("l4", 0.3e12, 121e12),
}
"""Data-sheet figures (SXM parts, dense bfloat16)."""


@dataclass(frozen=True)
class ModelShape:
    """The properties of a decoder that determine its costs."""

    params: float
    num_layers: int
    kv_bytes_per_token: float = 0.0
    bytes_per_param: float = 2.0

    @property
    def hidden_size(self) -> float:
        """Hidden size of a decoder with 12 H^2 weights a layer, which is accurate enough for the traffic of a link."""
        return (self.params / (12 * self.num_layers)) ** 0.5


@dataclass(frozen=True)
class Wire:
    """A connection between devices, if it is not that of a single node."""

    latency: float
    """Seconds of the smallest message."""
    bandwidth: float
    """Bytes per second."""


@dataclass(frozen=True)
class Cluster:
    """Devices that share one model's weights."""

    hardware: Hardware
    num_devices: int = 1
    link: Wire | None = None
    """None for the hardware's own all-reduce among devices of one node."""

    def pass_seconds(self, shape: ModelShape, num_nodes: float, *, batch_size: int, context: int) -> float:
        """Seconds of one pass by the roofline."""
        device, share = self.hardware, self.num_devices * self.hardware.efficiency
        read = shape.params * shape.bytes_per_param + batch_size * (context + num_nodes) * shape.kv_bytes_per_token
        multiplied = 2 * shape.params * batch_size * num_nodes
        latency = shape.num_layers * self.layer_seconds(shape, batch_size * num_nodes)
        return max(read / device.bandwidth, multiplied / device.flops) / share + latency

    def layer_seconds(self, shape: ModelShape, num_rows: float) -> float:
        """Seconds of a layer beyond arithmetic: launches, and two all-reduces among several devices."""
        reduces = 2 * self.message_seconds(shape, num_rows) if self.num_devices > 1 else 0.0
        return self.hardware.layer_latency + reduces

    def message_seconds(self, shape: ModelShape, num_rows: float) -> float:
        """One all-reduce of 16-bit states: every device sends and receives 2 (N - 1) / N of them."""
        if self.link is None:
            return self.hardware.reduce_latency
        moved = 2 * (self.num_devices - 1) / self.num_devices * num_rows * shape.hidden_size * 2
        return self.link.latency + moved / self.link.bandwidth


def hardware_named(name: str) -> Hardware:
    if name not in HARDWARE:
        raise OptionError(f"unknown hardware {name!r}; {nearest(name, HARDWARE)}")
    return HARDWARE[name]


@dataclass(frozen=True)
class Scenario:
    """A target and a draft on a cluster."""

    target: ModelShape
    draft: ModelShape | None
    cluster: Cluster
    batch_size: int = 1
    context: int = 1024
    host_seconds: float = 2e-4
    draft_cluster: Cluster | None = field(default=None)
    """Devices of the draft; one device of the same kind if not given."""

    def cost(self, length: int) -> float:
        """Seconds of a round with ``length`` guesses. A round without guesses has no draft either."""
        target = self.cluster.pass_seconds(self.target, length + 1, batch_size=self.batch_size, context=self.context)
        drafting = 0.0
        if self.draft is not None and length:
            place = self.draft_cluster or Cluster(self.cluster.hardware)
            one = place.pass_seconds(self.draft, 1, batch_size=self.batch_size, context=self.context)
            drafting = length * one
        return target + drafting + self.host_seconds

    def speed(self, length: int, by_depth: Sequence[float], *, num_tokens: int = 256) -> float:
        """Tokens per second of the whole batch."""
        return self.batch_size * predicted_speed(num_tokens, length, by_depth, cache(self.cost))

    def best_length(self, by_depth: Sequence[float], *, longest: int = 12, num_tokens: int = 256) -> int:
        return max(range(longest + 1), key=lambda length: self.speed(length, by_depth, num_tokens=num_tokens))
