"""A device that is played on the CPU: captured rounds run their steps again instead of a graph.

The decoder's kernels are played by PyTorch (their own tests compare the two), the others are interpreted.

So the whole of a captured lane can be tested without a GPU, and what a run captures or compiles is counted. A kernel is
compiled anew for what Triton specialises on: numbers known at compile time, types, and whether a whole number is 1 or, like an
address, a multiple of 16.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.device.drafters.heads import memory as head_memory
from outrider.engine import round_graph
from outrider.engine.captured_rounds import RoundGraphs
from outrider.engine.device_lane import DeviceLane
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.gpu import decoder, products, stream, sums, tree_heads
from outrider.models.gpu.decoder import FastDecoder


class PlayedEvent:
    """Every round takes a millisecond."""

    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: PlayedEvent) -> float:
        return 0.0 if other is self else 1.0


class PlayedGraph:
    """Steps that are run again."""

    def __init__(self, steps: Sequence[Callable[[], None]]) -> None:
        self._steps = steps

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self._steps:
                step()
        owner: Any = getattr(self._steps[0], "__self__", None)
        if getattr(owner, "logits", None) is not None:  # a graph would have written them where they were
            owner.logits = owner._scored[1]


class Made:
    """What was captured and compiled."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.kernels: dict[Hashable, int] = {}
        """By kernel and what it is specialised on: how often it was launched."""
        self.is_played = False
        """A kernel that is launched now is counted, and PyTorch does what it does."""

    def played(self, launch: Callable[..., Any], play: Callable[..., Any]) -> Callable[..., Any]:
        """As ``launch``, by ``play``."""

        def both(*args: Any, **kwargs: Any) -> Any:
            self.is_played = True
            try:
                kept = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
                launch(*kept, **kwargs)
            finally:
                self.is_played = False
            return play(*args, **kwargs)

        return both

    @contextmanager
    def nothing_new(self) -> Iterator[None]:
        """Fails where something is captured or compiled inside."""
        num_graphs, known = len(self.graphs), set(self.kernels)
        yield
        fresh = [key for key in self.kernels if key not in known]
        assert self.graphs[num_graphs:] == [] and fresh == []


def kind_of(value: Any) -> Hashable:
    """What Triton specialises an argument on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int", value == 1, value % 16 == 0, abs(value) < 1 << 31
    return type(value).__name__


_parameters = functools.cache(lambda fn: inspect.signature(fn).parameters)


def specialised(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    given = _parameters(function.fn)
    values = {**dict(zip(given, args, strict=False)), **kwargs}
    free = function.kwargs.get("do_not_specialize") or ()
    key = list[Hashable]()
    for place, (name, value) in enumerate(values.items()):
        if name not in given or "constexpr" in str(given[name].annotation):
            key.append((name, value if isinstance(value, Hashable) else str(value)))
        elif not (name in free or place in free):
            key.append((name, kind_of(value)))
    return function.fn.__name__, *key


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Memory that no device copies from."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        del pin_memory
        return make(*args, **kwargs)

    return made


def play(patch: pytest.MonkeyPatch) -> Made:
    """Play the device from now on."""
    made, launch = Made(), interpreter.InterpretedFunction.run

    def counted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        key = specialised(self, args, kwargs)
        made.kernels[key] = made.kernels.get(key, 0) + 1
        return None if made.is_played else launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    def captured(steps: Sequence[Callable[[], None]], pool: Any) -> PlayedGraph:
        del pool
        made.graphs.append(", ".join(getattr(step, "__name__", "?") for step in steps))
        return PlayedGraph(steps)

    patch.setattr(interpreter.InterpretedFunction, "run", counted)
    patch.setattr(products, "product", made.played(products.product, multiplied))
    patch.setattr(tree_heads, "rotate_and_write", made.played(tree_heads.rotate_and_write, rotated))
    for module in (tree_heads, head_memory):
        patch.setattr(module, "attend_tree", made.played(attend_tree, attended))
    for module in (stream, sums, decoder):
        patch.setattr(module, "add_norm", made.played(sums_add_norm, normed))
    patch.setattr(round_graph, "_captured", captured)
    patch.setattr(torch.cuda, "Event", PlayedEvent)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("zeros", "full"):
        patch.setattr(torch, name, _unpinned(getattr(torch, name)))
    return made


def multiplied(
    x: Tensor, weight: Tensor, *, tile: Any, gated: bool = False, out_dtype: Any = None, finish: Any = None
) -> Tensor:
    y = x.float() @ weight.float().T
    if finish is not None and finish.bias is not None:
        y = y + finish.bias
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if tile.num_parts > 1:
        return torch.cat([y[None], y.new_zeros(tile.num_parts - 1, *y.shape)])
    return y.to(out_dtype or x.dtype)


def rotated(qkv: Tensor, memory: Any, rows: Any, *, sights: Any, tables: Any, bias: Any = None, norms: Any = None) -> Tensor:
    assert norms is None
    (keys, values), qkv = memory, qkv.sum(0) if qkv.dim() == 4 else qkv
    qkv = qkv if bias is None else qkv + bias
    (batch_size, num_nodes, _), num_kv, size = qkv.shape, keys.shape[1], keys.shape[3]
    heads = qkv.view(batch_size, num_nodes, -1, size)
    queries, fresh, read = heads.split([heads.shape[2] - 2 * num_kv, num_kv, num_kv], 2)
    slots = rows.lengths[:, None].long() + sights.start + torch.arange(num_nodes)
    at = slots if sights.depths is None else rows.lengths[:, None].long() + sights.depths
    if tables is not None:
        cos, sin = (table[at][:, :, None] for table in tables)
        queries, fresh = (part * cos + part.roll(size // 2, -1) * sin for part in (queries, fresh))
    pages = rows.places.long().gather(1, slots // rows.page_len)
    keys[pages, :, slots % rows.page_len] = fresh.to(keys.dtype)
    values[pages, :, slots % rows.page_len] = read.to(values.dtype)
    return queries.to(keys.dtype)


def attended(queries: Tensor, memory: Any, rows: Any, *, sights: Any, cut: Any, scale: float, bounds: Any = None) -> Tensor:
    del cut, bounds
    seen = torch.empty_like(queries)
    num_nodes, num_kv = queries.shape[1], memory[0].shape[1]
    for row, length in enumerate(rows.lengths.tolist()):
        end = length + sights.start + num_nodes
        pages = rows.places[row, : -(-end // rows.page_len)].long()
        keys, values = (part[pages].transpose(0, 1).flatten(1, 2)[:, :end] for part in memory)
        nodes = torch.arange(sights.start + num_nodes)
        if sights.words is None:
            visible = nodes[None] <= sights.start + torch.arange(num_nodes)[:, None]
        else:
            visible = (sights.words[row][:, nodes // 64] >> (nodes % 64)) & 1 == 1
        visible = torch.cat([torch.ones(num_nodes, length, dtype=torch.bool), visible], 1)
        asked = queries[row].transpose(0, 1).unflatten(0, (num_kv, -1))
        found = (asked @ keys[:, None].transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf).softmax(-1)
        seen[row] = (found @ values[:, None]).flatten(0, 1).transpose(0, 1)
    return seen


def normed(residual: Tensor, parts: Tensor | None, norm: Any, ending: Any = sums.PLAIN) -> Tensor:
    assert norm is None or (norm.bias is None and not norm.centred)
    residual.copy_(sums.added(residual, parts, ending))
    return residual if norm is None else torch.rms_norm(residual, residual.shape[-1:], norm.weight, norm.eps)


sums_add_norm = sums.add_norm


def lane_of(graphs: RoundGraphs) -> Callable[[Method], DeviceLane]:
    return lambda _: DeviceLane(graphs)


@dataclass
class Played:
    """What requests say, and what was guessed on the way."""

    texts: list[list[int]]
    num_passes: list[int]
    num_drafted: list[int]
    num_accepted: list[int]


def played(target: FastDecoder, method: Method, requests: Sequence[Request], graphs: RoundGraphs | None) -> Played:
    """Requests in captured rounds, or on the host."""
    lane = None if graphs is None else lane_of(graphs)
    scheduler = Scheduler(target, lambda _: method, slots=Slots(8, 4096), device_lane=lane)
    states = [RequestState.of(request) for request in requests]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    counts = [(state.stats.num_passes, state.stats.num_drafted, state.stats.num_accepted) for state in states]
    return Played([state.output_ids for state in states], *map(list, zip(*counts, strict=True)))
