"""Keys and values in 16 bits, FP8 and int8 on a GPU: attention, passes, tokens per second and pages, behind long contexts.

    PYTHONPATH=src python benchmarks/gpu_kv_cache.py [--contexts 1024 15000 32768] [--json FILE]

The weights are those of the bundled target in Llama-3-8B's shapes (recipes/inflate.py). Three decoders share them, and differ
in the storage of their keys alone. All of them take turns, in one process. ``attention`` is one layer's, in microseconds.
``pass`` is a captured pass of the whole model, in milliseconds. A shape is rows x nodes, where more than one node is a tree of
sixteen. Of each, the quartiles and the
median are kept. ``texts`` are requests behind 15,000 tokens, as ``LLM.generate`` runs them: the rate after the first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes")]
from inflate import LLAMA_8B, inflated_weights  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bench.provenance import keep_results  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.cache.page_pool import PagePool  # noqa: E402
from outrider.cache.paged import PagedCache  # noqa: E402
from outrider.core.key_storage import STORAGES  # noqa: E402
from outrider.core.request import Request  # noqa: E402
from outrider.core.tree import TokenTree  # noqa: E402
from outrider.cuda_graphs import Rounds  # noqa: E402
from outrider.methods import compose  # noqa: E402
from outrider.models.attention.tree_triton import attend_tree  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402
from outrider.models.gpu.stream import Step  # noqa: E402

SHAPES = ((1, 1), (1, 16), (8, 1), (8, 16))
GIGABYTES, PROMPT, NEW = 40, 15_000, 64
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 7, 9, 5, 3, 6, 9]
"""A tree of sixteen nodes, as best-first drafting makes them."""


def opened(longest: int, num_rows: int) -> dict[str, FastDecoder]:
    """A decoder for every storage, on the same weights, with pages for so many rows of the longest text."""
    device = torch.device("cuda")
    config, weights = inflated_weights(bundled_path("target"), LLAMA_8B, dtype=torch.bfloat16, device=device)
    found: dict[str, FastDecoder] = {}
    for name, storage in STORAGES.items():
        target = found[name] = FastDecoder(replace(config, max_len=longest), weights, numerics="invariant")
        if storage.is_rounded:
            target.store_keys(storage)
        target.pool.hold(num_rows * target.pool.pages_for(longest + 64) + 8)
        filled(target.pool)
    return found


def filled(pool: PagePool) -> None:
    """Random keys and values in every layer."""
    numbers = torch.randn(
        pool.block.shape[1:], dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    parts = (numbers,) if not pool.storage.is_rounded else pool.storage.rounded(numbers)
    for block, part in zip(pool.blocks, parts, strict=True):
        for layer in block:
            layer.copy_(part.view(layer.shape))


@torch.inference_mode()
def behind(target: FastDecoder, num_rows: int, num_nodes: int, context: int) -> tuple[TokenTree, PagedCache, Step]:
    """A tree behind so many tokens, with the data of its pass as captured rounds have it."""
    cache = target.new_cache(num_rows)
    cache.extend(context + num_nodes)
    cache.lengths = [context] * num_rows
    tokens = list(range(5, 5 + num_nodes))
    tree = TokenTree.of_rows([(tokens, PARENTS[:num_nodes])] * num_rows, target.device)
    short = target.step_of(tree, cache)
    return tree, cache, target.step(short.shape, short.rows, short.sights, num_slots=target.num_slots)


@torch.inference_mode()
def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each: the first quartile, the median and the third."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(repeats + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.quantiles(each, n=4) for name, each in times.items()}


def rows_of(targets: dict[str, FastDecoder], contexts: list[int], most_rows: int) -> Iterator[dict[str, Any]]:
    """Attention of one layer, and whole passes."""
    layers = 32
    for context in contexts:
        for num_rows, num_nodes in SHAPES:
            if num_rows > most_rows:
                continue
            passes, looks, held = dict[str, Any](), dict[str, Any](), list[Any]()
            for name, target in targets.items():
                tree, cache, step = behind(target, num_rows, num_nodes, context)
                shape = (num_rows, num_nodes, target.config.num_heads, target.config.head_dim)
                queries = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

                def look(target: FastDecoder = target, step: Step = step, queries: torch.Tensor = queries) -> None:
                    for layer in range(layers):  # of different layers: the device's cache does not hold them all
                        memory, cut = target.pool.memory(layer), step.cuts[0]
                        attend_tree(queries, memory, step.rows, sights=step.sights, cut=cut, scale=target.config.query_scale)

                looks[name] = captured(look)
                passes[name] = captured(lambda target=target, tree=tree, step=step: target.forward(tree.tokens, step))
                held.append((tree, cache, step, queries))  # graphs have their addresses
            attention, whole = in_turns(looks, 9), in_turns(passes, 9)
            del held, looks, passes
            row: dict[str, Any] = {"context": context, "rows": num_rows, "nodes": num_nodes}
            for name in targets:
                row[f"attention {name}, us"] = [round(1e3 * time / layers, 2) for time in attention[name]]
                row[f"pass {name}, ms"] = [round(time, 3) for time in whole[name]]
            yield row


def texts_of(targets: dict[str, FastDecoder], context: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of one request behind a long prompt, plain, after its first token."""
    params, rates = SamplingParams(max_tokens=NEW, ignore_eos=True), dict[str, list[float]]()
    all_rounds = {name: Rounds(target) for name, target in targets.items()}
    methods = {name: compose("plain", target) for name, target in targets.items()}
    for turn in range(repeats + 1):
        for name, rounds in all_rounds.items():
            request = Request([1 + turn, *((5 + 7 * place) % 4000 for place in range(context - 1))], params)
            stamps = [
                (time.perf_counter(), len(step.new_tokens)) for step in rounds.run(methods[name], [request], max_batch_size=1)
            ]
            first, last = stamps[0], stamps[-1]
            if turn:  # the first compiles and captures
                rates.setdefault(name, []).append(sum(count for _, count in stamps[1:]) / (last[0] - first[0]))
    return {name: [round(rate, 1) for rate in each] for name, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 15_000, 32_768])
    parser.add_argument("--rows", type=int, default=8, help="most rows of a pass")
    parser.add_argument("--texts", type=int, default=2, help="requests of every storage")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    targets = opened(max(PROMPT, *arguments.contexts) + 512, arguments.rows)
    sizes = {name: target.pool.page_bytes for name, target in targets.items()}
    page_len = targets["auto"].page_len
    storages = {
        name: {
            "bytes of a token": size // page_len,
            f"pages in {GIGABYTES} GB": GIGABYTES * 10**9 // size,
            "times": round(sizes["auto"] / size, 2),
        }
        for name, size in sizes.items()
    }
    print(storages, flush=True)
    rows = list[dict[str, Any]]()
    for row in rows_of(targets, arguments.contexts, arguments.rows):
        rows.append(row)
        print(f"{time.perf_counter() - began:.0f} s", row, flush=True)
    texts = texts_of(targets, PROMPT, arguments.texts) if arguments.texts else {}
    print(f"{time.perf_counter() - began:.0f} s", texts, flush=True)
    what = (
        "keys and values in 16 bits, FP8 and int8: Llama-3-8B shapes, attention of a layer and whole passes behind long "
        "contexts, in turns; first quartile, median, third"
    )
    keep_results(arguments.json, what, rows, script="benchmarks/gpu_kv_cache.py", storages=storages, texts=texts)


if __name__ == "__main__":
    main()
