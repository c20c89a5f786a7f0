"""The GPU fast path on 8B shapes, against its floor and against Hugging Face, in one process on the same weights.

    PYTHONPATH=src python benchmarks/gpu.py [--json FILE] [--sections passes generate ...]

The models are the bundled pair, inflated (recipes/inflate.py): Llama-3-8B's shapes with the small model's language. Prints
one table per question; the last line of stdout is one JSON document. The floor is the bytes of the weights a pass reads over
4.3 TB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes")]
from bundled_chat import read_story  # noqa: E402  # pyright: ignore
from inflate import LLAMA_8B, ONE_LAYER_DRAFT, inflated_raw_config, inflated_weights  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.cache.paged import PagedCache  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.request import Request, RequestState  # noqa: E402
from outrider.core.tree import TokenTree  # noqa: E402
from outrider.cuda_graphs import Rounds  # noqa: E402
from outrider.engine.device_seats import Seat  # noqa: E402
from outrider.engine.round_kind import RoundKind  # noqa: E402
from outrider.methods import compose  # noqa: E402
from outrider.models.attention.tree_tiles import Rows, Sights, paths_of  # noqa: E402
from outrider.models.attention.tree_triton import pack_words  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402
from outrider.models.gpu.pages import flat_rows, rows_in  # noqa: E402
from outrider.models.weights import Weights  # noqa: E402

BANDWIDTH = 4.3e12
DEVICE = torch.device("cuda")
SECTIONS = ("start-up", "passes", "generate", "copying", "round", "batches", "bits", "hugging-face")
STORIES = (
    "Once upon a time, there was a little fox who lived in a forest. The fox had a red ball. One day, the fox",
    "Tom and Lily went to the park. They saw a big dog. The dog was sad because it had lost its bone. Tom said",
    "One day, a girl named Mia found a box in the garden. She wanted to open the box, but the box was shut. Mia",
    "The old man had a small boat. Every morning he went to the sea in his boat to catch fish. One morning",
)
HELD_OUT = ROOT / "benchmarks/held_out_stories.jsonl"
"""The first sixteen stories of those held out when the bundled models were trained: the models' own domain, unpicked."""
NUM_COPIED = 12
EOS = frozenset({0, 4})
COPYING = {"again": "Repeat the story.", "renamed": "Rewrite the story with the name {new} instead of {old}."}
"""What the copying prompts ask for, in the chat form of the bundled target: a story word for word, and a story edited."""
TREES = {"5 levels, 32 nodes": ("4,2,2,1,1", 5, 32), "8 levels, 32 nodes": ("3,2,1,1,1,1,1,1", 8, 32)}
"""Branching, depth and nodes of trees in captured rounds."""
SEARCHES = ((8, 63), (8, 31), (6, 31))
"""Levels and guesses of best-first trees in captured rounds."""


class Bench:
    """Models, prompts and what was measured."""

    def __init__(self, *, context: int) -> None:
        began = time.perf_counter()
        self.config, self.weights = inflated_weights(bundled_path("target"), LLAMA_8B, dtype=torch.bfloat16, device=DEVICE)
        draft_config, self.draft_weights = inflated_weights(
            bundled_path("draft"), ONE_LAYER_DRAFT, dtype=torch.bfloat16, device=DEVICE
        )
        torch.cuda.synchronize()
        self.results: dict[str, Any] = {"inflate_seconds": time.perf_counter() - began}
        self.draft_config = draft_config
        self.targets: dict[str, FastDecoder] = {}
        self.drafts: dict[str, FastDecoder] = {}
        self.rounds: dict[str, Rounds] = {}
        for mode in ("fast", "invariant"):
            self.add(mode, numerics=mode)
        self.floor = bytes_read(self.weights) / BANDWIDTH
        self.draft_floor = bytes_read(self.draft_weights) / BANDWIDTH
        codec = load_codec(bundled_path("target"))
        self.prompts = [_of_length(codec.encode(story), context) for story in STORIES]
        self.copying = {label: [codec.encode(text) for text in texts] for label, texts in copying_prompts().items()}

    def add(self, mode: str, *, numerics: str, bits: int = 16) -> None:
        """Decoders of their own for a mode, on the same weights or on rounded ones."""
        self.targets[mode] = FastDecoder(self.config, self.weights, numerics=numerics, bits=bits)
        self.drafts[mode] = FastDecoder(self.draft_config, self.draft_weights, bits=bits)
        self.rounds[mode] = Rounds(self.targets[mode])

    def method(self, name: str, *, mode: str = "fast", policy: str = "fixed", **options: Any) -> Any:
        return compose(name, self.targets[mode], draft=self.drafts[mode], policy=policy, options=options)

    def run(
        self, method: Any, prompts: list[list[int]], num_tokens: int, *, mode: str = "fast", batch: int = 1, ends: bool = False
    ) -> list[RequestState]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=not ends)
        requests = [Request(prompt, params, eos_ids=EOS) for prompt in prompts]
        steps = self.rounds[mode].run(method, requests, max_batch_size=batch)
        done = {step.request: step.state for step in steps if step.state.is_finished}
        return [done[index] for index in range(len(prompts))]


def held_out_stories() -> list[str]:
    return [json.loads(line)["text"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]


def copying_prompts() -> dict[str, list[str]]:
    """Every one of the first held-out stories with either wish. The hero is whoever the recipe that made the conversations of
    the training data says it is; a story without one stays out of "renamed"."""
    stories = [read_story(text) for text in held_out_stories()[:NUM_COPIED]]
    asked = {"again": [(story.text, COPYING["again"]) for story in stories]}
    named = [story for story in stories if story.hero]
    asked["renamed"] = [
        (story.text, COPYING["renamed"].format(old=story.hero, new="Otto" if story.hero != "Otto" else "Hugo"))
        for story in named
    ]
    return {
        label: [f"<|user|>\n{text}\n\n{wish}<|end|>\n<|assistant|>\n" for text, wish in pairs] for label, pairs in asked.items()
    }


def bytes_read(weights: Weights) -> int:
    """What a pass reads: everything but the embedding."""
    return sum(tensor.nbytes for tensor in weights.tensors) - weights.embedding.nbytes


def _of_length(story: list[int], length: int) -> list[int]:
    """The story told again and again, up to ``length`` tokens, so that it is where the text goes on."""
    return (story * (length // len(story) + 1))[-length:]


def median_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def some_tree(num_nodes: int) -> TokenTree:
    generator = torch.Generator().manual_seed(0)
    parents = [-1] + [int(torch.randint(max(0, n // 2 - 2), n, (), generator=generator)) for n in range(1, num_nodes)]
    return TokenTree.of_rows([(list(range(5, 5 + num_nodes)), parents)], DEVICE)


def start_up(bench: Bench, num_guesses: int) -> None:
    """Seconds from weights on the device to captured rounds: kernels compiled (unless Triton has them on disk), graphs made."""
    for name in ("plain", "draft-model"):
        options: dict[str, Any] = {} if name == "plain" else {"num_draft_tokens": num_guesses}
        method, began = bench.method(name, **options), time.perf_counter()
        for _ in bench.rounds["fast"].prepare(method):
            torch.cuda.synchronize()
        bench.results[f"ready_seconds/{name}"] = time.perf_counter() - began
        print(f"ready for {name} after {time.perf_counter() - began:.1f} s", flush=True)


@torch.inference_mode()
def passes(bench: Bench) -> None:
    """Milliseconds of a target pass, by context, nodes and numerics."""
    print(f"\n{'target pass, ms':<26}{'1':>8}{'8':>8}{'16':>8}{'64 tree':>9}{'64/1':>7}   floor {bench.floor * 1e3:.2f} ms")
    for mode in ("fast", "invariant"):
        for context in (1024, 8192):
            target = FastDecoder(bench.config, bench.weights, numerics=mode)  # its pages go with it
            cache = _cache(target, context)
            found = {
                n: _pass_ms(
                    target,
                    rows_in(
                        flat_rows(cache, max(map(len, cache.pages))).to(target.device), cache.batch_size, target.pool.page_len
                    ),
                    n,
                )
                for n in (1, 8, 16, 64)
            }
            bench.results[f"pass_ms/{mode}/{context}"] = found
            row = "".join(f"{found[n]:>8.3f}" for n in (1, 8, 16)) + f"{found[64]:>9.3f}{found[64] / found[1]:>7.2f}"
            print(
                f"{mode + ', context ' + str(context):<26}{row}   {found[1] / bench.floor / 1e3:.2f}x the floor at 1 node",
                flush=True,
            )


def _cache(target: FastDecoder, context: int) -> PagedCache:
    cache = target.new_cache(1)
    cache.extend(context + 128)
    cache.lengths = [context]
    return cache


@torch.inference_mode()
def _pass_ms(target: FastDecoder, rows: Rows, num_nodes: int) -> float:
    tree = some_tree(num_nodes) if num_nodes >= 64 else TokenTree.chain(torch.arange(5, 5 + num_nodes, device=DEVICE)[None])
    words = None if tree.is_chain else pack_words(tree.ancestors)
    depths = None if tree.is_chain else tree.depths.int()
    paths = None if tree.is_chain else paths_of(tree.ancestors)
    step = target.step((1, num_nodes), rows, Sights(words, depths, 0, paths), num_slots=target.num_slots)
    tokens = tree.tokens.clone()
    target.forward(tokens, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.forward(tokens, step)
    return median_ms(graph.replay)


def generation(bench: Bench, num_tokens: int, lengths: tuple[int, ...]) -> None:
    """Decode speed of our methods at batch 1, and whether their text is that of plain decoding."""
    rows: list[tuple[str, str, Any]] = [("plain", "fast", bench.method("plain"))]
    rows += [(f"draft-model K={k}", "fast", bench.method("draft-model", num_draft_tokens=k)) for k in lengths]
    rows += [(f"prompt-lookup K={k}", "fast", bench.method("prompt-lookup", num_draft_tokens=k)) for k in lengths]
    rows += [("draft-model adaptive", "fast", bench.method("draft-model", policy="adaptive", num_draft_tokens=12))]
    rows += [("plain, invariant", "invariant", bench.method("plain", mode="invariant"))]
    for name, k in (("draft-model", 6), ("prompt-lookup", 8)):
        rows += [(f"{name} K={k}, invariant", "invariant", bench.method(name, mode="invariant", num_draft_tokens=k))]
    for levels, nodes in SEARCHES:
        search = bench.method("best-first", num_draft_tokens=levels, num_tree_nodes=nodes)
        rows.insert(1 + len(lengths), (f"best-first {levels} levels, {nodes} guesses", "fast", search))
    for label, (branching, depth, nodes) in TREES.items():
        options: dict[str, Any] = {"branching": branching, "num_draft_tokens": depth, "num_tree_nodes": nodes}
        rows.insert(1 + len(lengths), (f"draft-tree {label}", "fast", bench.method("draft-tree", **options)))
    compared(bench, rows, bench.prompts, num_tokens, title="batch 1, greedy")


def compared(
    bench: Bench,
    rows: Sequence[tuple[str, str, Any]],
    prompts: list[list[int]],
    num_tokens: int,
    *,
    title: str,
    ends: bool = False,
) -> None:
    """One line per (label, mode, method): speed, and whether the text is that of plain decoding, the first row of its mode. If
    not, the line says by how much the two best logits differ at the first difference. ``ends``: a text may end before it has
    ``num_tokens``."""
    for _, mode, method in rows:
        bench.run(method, prompts[:1], 24, mode=mode)  # captures
    print(f"\n{title:<36}{'tok/s':>8}{'ms/round':>9}{'tok/round':>10}{'to plain':>9}   same text as plain")
    plain: dict[str, tuple[float, list[list[int]]]] = {}
    for label, mode, method in rows:
        states = bench.run(method, prompts, num_tokens, mode=mode, ends=ends)
        tokens, seconds = sum(s.stats.num_tokens for s in states), sum(s.stats.seconds for s in states)
        num_rounds = sum(s.stats.num_passes for s in states)
        texts = [s.output_ids for s in states]
        base, reference = plain.setdefault(mode, (tokens / seconds, texts))
        same = sum(a == b for a, b in zip(texts, reference, strict=True))
        pairs = zip(prompts, reference, texts, strict=True)
        gaps = [gap for prompt, a, b in pairs if (gap := _gap(bench, mode, prompt, a, b)) is not None]
        bench.results[f"{title}/{label}"] = {
            "tokens_per_second": tokens / seconds, "ms_per_round": seconds / num_rounds * 1e3, "same": f"{same}/{len(texts)}",
            "tokens_per_round": tokens / num_rounds, "to_plain": tokens / seconds / base, "gaps": gaps,
        }  # fmt: skip
        print(
            f"{label:<36}{tokens / seconds:>8.1f}{seconds / num_rounds * 1e3:>9.3f}{tokens / num_rounds:>10.2f}"
            f"{tokens / seconds / base:>8.2f}x   {same}/{len(texts)}"
            + (f", top-2 gaps {', '.join(f'{gap:.3f}' for gap in gaps)}" if gaps else ""),
            flush=True,
        )


def copying(bench: Bench, num_tokens: int) -> None:
    """Prompt lookup where there is something to copy: stories told again, word for word or with another name."""
    rows: list[tuple[str, str, Any]] = []
    for mode in ("fast", "invariant"):
        rows.append((f"plain, {mode}", mode, bench.method("plain", mode=mode)))
        options = [8] if mode == "fast" else [8, 16]
        rows += [
            (f"prompt-lookup K={k}, {mode}", mode, bench.method("prompt-lookup", mode=mode, num_draft_tokens=k))
            for k in options
        ]
    for label, prompts in bench.copying.items():
        compared(bench, rows, prompts, num_tokens, title=f"stories {label}, batch 1, greedy", ends=True)


def few_bits(bench: Bench, num_tokens: int) -> None:
    """Rounded weights, target and draft: other models, each compared with its own plain decoding."""
    rows: list[tuple[str, str, Any]] = [("plain, 16 bits", "fast", bench.method("plain"))]
    for bits in (8, 4):
        mode = f"int{bits}"
        bench.add(mode, numerics="invariant", bits=bits)
        rows.append((f"plain, {mode}", mode, bench.method("plain", mode=mode)))
        rows.append((f"draft-model K=6, {mode}", mode, bench.method("draft-model", mode=mode, num_draft_tokens=6)))
        target = bench.targets[mode]
        cache = _cache(target, 1024)
        bench.results[f"floor_ms/{mode}"] = target.weights.bytes_read / BANDWIDTH * 1e3
        bench.results[f"pass_ms/{mode}"] = found = {
            n: _pass_ms(
                target,
                rows_in(flat_rows(cache, max(map(len, cache.pages))).to(target.device), cache.batch_size, target.pool.page_len),
                n,
            )
            for n in (1, 8, 16, 64)
        }
        print(f"{mode}, ms of a pass by nodes (64: a tree), context 1024: { {n: round(ms, 3) for n, ms in found.items()} }")
    compared(bench, rows, bench.prompts, num_tokens, title="rounded weights, batch 1, greedy")


@torch.inference_mode()
def _gap(bench: Bench, mode: str, prompt: list[int], plain: list[int], other: list[int]) -> float | None:
    """How far plain decoding's two best logits lie apart where another text leaves it; None if it does not."""
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if place is None:
        return None
    target, text = bench.targets[mode], [*prompt, *plain[:place]]
    cache = target.new_cache(1)
    target.prefill([text[:-1]], cache)
    best = target.score(TokenTree.chain(torch.tensor([text[-1:]], device=DEVICE)), cache).logits[0, 0].topk(2).values
    return float(best[0] - best[1])


def read_prompt(target: FastDecoder, prompt: list[int]) -> PagedCache:
    """A cache that holds all of a prompt but its last token."""
    cache = target.new_cache(1)
    target.prefill([prompt[:-1]], cache)
    return cache


def round_parts(bench: Bench, num_guesses: int) -> None:
    """Where a round's time goes: the whole, its pass, its draft, the rest on the device, the gap between rounds."""
    from outrider.cuda_graphs import captured

    graphs = captured(bench.method("draft-model", num_draft_tokens=num_guesses), bench.targets["fast"])
    assert graphs is not None
    state = RequestState.of(Request(bench.prompts[0], SamplingParams(max_tokens=400, ignore_eos=True)))
    frame = graphs.frame(1)
    with torch.inference_mode():
        graphs.seat(1, {0: Seat(0, state, read_prompt(graphs.target, bench.prompts[0]))})
        graphs.start(1, {0: state})
        graph = graphs.round(RoundKind(1, num_guesses))
        held = frame.lengths.clone()

        def replay() -> None:
            frame.lengths.copy_(held)
            graph.launch()

        whole = median_ms(replay)
        score = _pass_ms(graphs.target, graphs.seats.rows(held - 1), num_guesses + 1)
        chain = torch.zeros(1, num_guesses + 1, dtype=torch.int64, device=DEVICE)
        drafting = torch.cuda.CUDAGraph()
        assert graphs.drafter is not None
        frame.lengths.copy_(held)
        graphs.drafter.propose(frame, chain, num_guesses)
        torch.cuda.synchronize()
        with torch.cuda.graph(drafting):
            graphs.drafter.propose(frame, chain, num_guesses)
        draft = median_ms(drafting.replay)
    graphs.leave(1)
    running = bench.run(bench.method("draft-model", num_draft_tokens=num_guesses), bench.prompts[:1], 200)[0].stats
    running = running.seconds / running.num_passes * 1e3
    rest, gap = whole - score - draft, running - whole
    share = (rest + gap) / running
    bench.results["round_ms"] = {"draft": draft, "verify": score, "walk_and_commit": rest, "host_gap": gap, "round": running}
    print(
        f"\nround of draft-model K={num_guesses}, ms: draft {draft:.3f}, verify {score:.3f}, walk + commit {rest:.3f}, "
        f"host gap {gap:.3f}; walk + commit + gap {share:.1%} of {running:.3f}",
        flush=True,
    )


def batches(bench: Bench, num_tokens: int, sizes: Sequence[int]) -> None:
    """Throughput of plain and of adaptive speculation by batch size."""
    print(f"\n{'batch':<8}{'plain tok/s':>12}{'draft-model adaptive':>22}{'to plain':>10}")
    plain, adaptive = bench.method("plain"), bench.method("draft-model", policy="adaptive", num_draft_tokens=6)
    for size in sizes:
        prompts = [bench.prompts[i % len(bench.prompts)][-256 + i :] for i in range(size)]
        speeds: list[float] = []
        for method in (plain, adaptive):
            bench.run(method, prompts, 48, batch=size)
            states = bench.run(method, prompts, num_tokens, batch=size)
            speeds.append(sum(s.stats.num_tokens for s in states) / max(s.stats.seconds for s in states))
        bench.results[f"batch/{size}"] = {"plain": speeds[0], "adaptive": speeds[1], "ratio": speeds[1] / speeds[0]}
        print(f"{size:<8}{speeds[0]:>12.1f}{speeds[1]:>22.1f}{speeds[1] / speeds[0]:>9.2f}x", flush=True)


def hugging_face(bench: Bench, num_tokens: int, *, compiled: bool) -> None:
    """transformers' generate on views of the same weights: eager, assisted, static cache with compile."""
    model = hf_model(bench.weights, inflated_raw_config(bundled_path("target"), LLAMA_8B))
    assistant = hf_model(bench.draft_weights, inflated_raw_config(bundled_path("draft"), ONE_LAYER_DRAFT))
    plain = _speed(bench, bench.method("plain"), num_tokens)
    best = _speed(bench, bench.method("draft-model", num_draft_tokens=8), num_tokens)
    print(f"\n{'Hugging Face generate':<34}{'tok/s':>8}{'ours plain':>12}{'draft-model':>13}")
    runs: list[tuple[str, dict[str, Any], int]] = [("eager", {}, 48), ("assisted, eager", {"assistant_model": assistant}, 96)]
    if compiled:
        runs.append(("static cache + compile", {"cache_implementation": "static"}, num_tokens))
    for label, options, count in runs:
        speed = _hf_speed(model, bench.prompts[0], count, options)
        bench.results[f"hugging_face/{label}"] = {
            "tokens_per_second": speed,
            "plain_over": plain / speed,
            "best_over": best / speed,
        }
        print(f"{label:<34}{speed:>8.1f}{plain / speed:>11.2f}x{best / speed:>10.2f}x", flush=True)


def _speed(bench: Bench, method: Any, num_tokens: int) -> float:
    bench.run(method, bench.prompts[:1], 16)
    stats = bench.run(method, bench.prompts[:1], num_tokens)[0].stats
    return stats.tokens_per_second


def _hf_speed(model: Any, prompt: list[int], count: int, options: dict[str, Any]) -> float:
    ids = torch.tensor([prompt], device=DEVICE)

    def call(new: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                       pad_token_id=0, **options)  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - began

    call(count)
    call(2)
    return (count - 2) / (call(count) - call(2))


def hf_model(weights: Weights, raw: dict[str, Any]) -> Any:
    """LlamaForCausalLM whose parameters are views of our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(dict(_hf_names(weights, config)), assign=True, strict=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(DEVICE)
    return model.eval()


def _hf_names(weights: Weights, config: Any) -> Iterator[tuple[str, Tensor]]:
    assert weights.norm is not None, "a Llama has a last norm"
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.norm
    yield "lm_head.weight", weights.head
    kv = config.num_key_value_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        assert layer.attention_norm is not None and layer.mlp_norm is not None, "a Llama"
        yield at + "input_layernorm.weight", layer.attention_norm
        yield at + "post_attention_layernorm.weight", layer.mlp_norm
        q, k, v = layer.qkv.split([config.num_attention_heads * config.head_dim, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        named = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": layer.out}
        named |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down}
        yield from ((f"{at}{name}.weight", tensor) for name, tensor in named.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--no-compile", action="store_true", help="leave out Hugging Face's static cache with compile")
    arguments = parser.parse_args()
    began = time.perf_counter()
    bench = Bench(context=arguments.context)
    if "start-up" in arguments.sections:
        start_up(bench, 6)
    if "passes" in arguments.sections:
        passes(bench)
    if "generate" in arguments.sections:
        generation(bench, arguments.tokens, (4, 6, 8))
    if "copying" in arguments.sections:
        copying(bench, arguments.tokens)
    if "round" in arguments.sections:
        round_parts(bench, 6)
    if "batches" in arguments.sections:
        batches(bench, arguments.tokens, arguments.batches)
    if "bits" in arguments.sections:
        few_bits(bench, arguments.tokens)
    if "hugging-face" in arguments.sections:
        hugging_face(bench, arguments.tokens, compiled=not arguments.no_compile)
    bench.results |= {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "floor_ms": bench.floor * 1e3, "draft_floor_ms": bench.draft_floor * 1e3, "context": arguments.context,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.results, indent=1))
    print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
