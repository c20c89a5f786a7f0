"""Quantised checkpoints on a GPU at 8B shapes: plain and speculative tokens per second against bf16 and against the floor.

    PYTHONPATH=src python benchmarks/gpu_quantised.py [--json FILE] [--tokens 128] [--repeats 5] [--forms nf4 ...]

The models are the bundled pair, inflated (recipes/inflate.py). The target's matrices are rounded on the device to the form
that a checkpoint has. Its head and the draft model stay in bf16, as in the checkpoints people have. Every form is first checked
against its own numbers in plain PyTorch. Runs of all forms are interleaved, and figures are medians of the repeats so far. The
file is written after each of them. The floor is the bytes that a pass reads over 4.3 TB/s. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent)]
from gpu import BANDWIDTH, Bench, _cache, _pass_ms, median_ms  # noqa: E402  # pyright: ignore
from gpu_wide import in_turns  # noqa: E402  # pyright: ignore

from outrider.bench.provenance import results_head  # noqa: E402
from outrider.core.request import RequestState  # noqa: E402
from outrider.cuda_graphs import Rounds  # noqa: E402
from outrider.models.decoder_weights import LayerWeights, Weights  # noqa: E402
from outrider.models.features import Experts  # noqa: E402
from outrider.models.few_bits import FewBits  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402
from outrider.models.gpu.experts import experts_mlp  # noqa: E402
from outrider.models.gpu.pages import flat_rows, rows_in  # noqa: E402
from outrider.models.gpu.products import multiply  # noqa: E402
from outrider.models.gpu.small_batch_matmul import product, reference_product  # noqa: E402
from outrider.models.gpu.tiles import Kind, tile_for  # noqa: E402
from outrider.models.packed import GROUP, LayerMatrices, Packed  # noqa: E402
from outrider.models.planes import UNIT, Planes, together  # noqa: E402
from outrider.models.quantised.float8 import round_inputs  # noqa: E402
from outrider.models.quantised.packed_rows import PackedRows  # noqa: E402

BF16 = "bf16"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "draft-model K=6": ("draft-model", {"num_draft_tokens": 6}),
    "draft-model K=8": ("draft-model", {"num_draft_tokens": 8}),
    "best-first 63": ("best-first", {"num_draft_tokens": 8, "num_tree_nodes": 63}),
}
LEAST = 2.0**-14
"""Smallest scale, because an inflated model has blocks of zeros, and 0 / 0 is no number."""
NODES = (1, 8, 16, 64, 128, 512)
TOKENS_HELD = 1 << 15


def nibbles(codes: Tensor) -> Tensor:
    """[out, in / 2] from codes 0 .. 15 [out, groups, 128]."""
    codes = codes.to(torch.uint8)
    return (codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4).flatten(1).contiguous()


def symmetric(weight: Tensor) -> Packed:
    """GPTQ without zeros: scales of 16 bits for groups of 128."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).clamp_(min=LEAST).half()
    codes = (groups / scales.float()[..., None] + 8).round_().clamp_(0, 15)
    return Packed(nibbles(codes), scales.T.contiguous())


def with_zeros(weight: Tensor) -> Packed:
    """AWQ: scales of 16 bits and zeros for groups of 128."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp_(min=LEAST).half()
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return Packed(nibbles(codes), scales.T.contiguous(), (zeros - 8).T.to(torch.bfloat16).contiguous())


def float_blocks(weight: Tensor) -> Packed:
    """FP8 as DeepSeek and Qwen publish it: a scale for 128 x 128."""
    blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp_(min=LEAST)
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).flatten(0, 1).flatten(1)
    return Packed(codes.contiguous(), scales.repeat_interleave(GROUP, 0).T.contiguous())


def float_outputs(weight: Tensor) -> Packed:
    """FP8 of compressed-tensors: a scale for each output."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).clamp_(min=LEAST)
    return Packed((weight.float() / scales).to(torch.float8_e4m3fn), scales.T.contiguous())


def from_table(weight: Tensor) -> Packed:
    """bitsandbytes' 4 bits: places in a table of quantiles of the normal law, scales of 32 bits for groups of 64."""
    chances = torch.linspace(0.03, 0.97, 16, device=weight.device)
    levels = torch.special.ndtri(chances)
    levels = levels / levels.abs().max()
    groups = weight.float().unflatten(1, (-1, 64))
    scales = groups.abs().amax(-1).clamp_(min=LEAST)
    codes = torch.bucketize(groups / scales[..., None], (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return Packed((codes[..., :32] | codes[..., 32:] << 4).flatten(1).contiguous(), scales.T.contiguous(), levels=levels)


def eight_bits(weight: Tensor) -> Planes:
    """Q8_0 of GGUF: a scale of 16 bits for 32."""
    groups = weight.float().unflatten(1, (-1, UNIT))
    scales = (groups.abs().amax(-1) / 127).clamp_(min=LEAST).half()
    codes = (groups / scales.float()[..., None]).round_().clamp_(-127, 127).flatten(1).add_(128).to(torch.uint8)
    return Planes(together(codes & 15, 4), scales.T.contiguous(), 128, together(codes >> 4, 4))


def four_bits_in_steps(weight: Tensor) -> Planes:
    """Q4_K of GGUF: scales and offsets of 32 are steps of 6 bits, in floats of 16 bits for 256."""
    groups = weight.float().unflatten(1, (-1, 8, UNIT))
    low = groups.amin(-1).clamp(max=0)
    scale = (groups.amax(-1) - low) / 15
    floats = [(each.amax(-1, keepdim=True) / 63).clamp_(min=LEAST).half() for each in (scale, -low)]
    steps, offset_steps = ((each / whole.float()).round_() for each, whole in zip((scale, -low), floats, strict=True))
    own, offset = floats[0].float() * steps, floats[1].float() * offset_steps
    codes = ((groups + offset[..., None]) / own.clamp(min=1e-12)[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    scales, offsets = floats[0][..., 0].T.contiguous(), -floats[1][..., 0].T.contiguous()
    whole = [each.flatten(1).to(torch.int8).T.contiguous() for each in (steps, offset_steps)]
    return Planes(together(codes.flatten(1), 4), scales, 0, None, whole[0], offsets, whole[1])


FORMS: dict[str, Callable[[Tensor], FewBits]] = {
    "int4 (GPTQ)": symmetric,
    "int4 (AWQ)": with_zeros,
    "fp8 blocks": float_blocks,
    "fp8 outputs": float_outputs,
    "fp8 blocks, w8a8": lambda weight: replace(float_blocks(weight), rounds_inputs=True),
    "fp8 outputs, w8a8": lambda weight: replace(float_outputs(weight), rounds_inputs=True),
    "nf4": from_table,
    "GGUF Q8_0": eight_bits,
    "GGUF Q4_K": four_bits_in_steps,
}


@dataclass(frozen=True)
class ExpertModel:
    """The shapes of a model's experts."""

    name: str
    hidden_size: int
    activation: str
    experts: Experts


GPT_OSS = ExpertModel(
    "gpt-oss-20b", 2880, "clamped", Experts(count=32, num_chosen=4, size=2880, normalised=True, layers=(True,))
)
QWEN3 = ExpertModel("Qwen3-30B-A3B", 2048, "silu", Experts(count=128, num_chosen=8, size=768, normalised=True, layers=(True,)))


def rounded_weights(weights: Weights, pack: Callable[[Tensor], FewBits]) -> Weights:
    """The same model with the layers' matrices rounded, as a quantised folder gives it."""
    rows = PackedRows()

    def table(matrix: Tensor) -> Tensor:
        return rows.table(pack(matrix))

    def layer(old: LayerWeights) -> LayerWeights:
        return replace(old, qkv=table(old.qkv), out=table(old.out), gate_up=table(old.gate_up), down=table(old.down))

    return replace(weights, layers=[layer(old) for old in weights.layers], rows=rows)


def check(name: str, pack: Callable[[Tensor], FewBits]) -> dict[str, Any]:
    """Products of every kind and number of rows against plain PyTorch; a row's bits must not depend on the others."""
    draw = torch.Generator("cuda").manual_seed(1)
    packed = pack(torch.randn(512, 4096, generator=draw, device="cuda").bfloat16() / 8)
    x = torch.randn(128, 4096, generator=draw, device="cuda").bfloat16()
    rounds_inputs = isinstance(packed, Packed) and packed.rounds_inputs
    inputs = multiplied_inputs(x) if rounds_inputs else x
    worst, same, lone = 0.0, True, None
    for kind in Kind:
        gated = kind is Kind.GATED
        expected = reference_product(inputs, packed.unpacked(torch.float32), gated=gated)
        first = None
        for count in (1, 5, 8, 16, 32, 64):
            y = multiply(x[:count], packed, kind)
            first = y[..., :1, :].clone() if first is None else first
            same = same and torch.equal(first, y[..., :1, :])
            whole = (y.sum(0) if y.dim() == 3 else y).float()
            worst = max(worst, float((whole - expected[:count]).norm() / expected[:count].norm()))
        wide = multiply(x, packed, kind).float()
        wide = wide.sum(0) if wide.dim() == 3 else wide
        worst = max(worst, float((wide - expected).norm() / expected.norm()))
        if not isinstance(packed, Packed) or rounds_inputs:
            continue  # there is one kernel
        tile = tile_for(kind, 8, 256 if gated else 512, bits=packed.bits)
        y = product(x[:8], packed, tile=tile, gated=gated)
        y = (y.sum(0) if y.dim() == 3 else y).float()
        lone = max(lone or 0.0, float((y - expected[:8]).norm() / expected[:8].norm()))
    print(
        f"check {name:<14} relative error {worst:.1e} (without the ring {lone or worst:.1e}), same bits at every count: {same}",
        flush=True,
    )
    return {"error": worst, "error_without_ring": lone, "same_bits": same}


def multiplied_inputs(x: Tensor) -> Tensor:
    """Inputs as products in 8 bits multiply them."""
    codes, steps = round_inputs(x)
    return codes.float() * steps.repeat_interleave(GROUP, -1)


Runs = dict[tuple[str, str], list[RequestState]]
"""Requests of every form and method, one for each repeat."""


def measure(bench: Bench, modes: list[str], num_tokens: int, repeats: int) -> Iterator[Runs]:
    """Every form and method in turns: what has run, after each repeat."""
    methods = {
        (mode, label): bench.method(name, mode=mode, **options) for mode in modes for label, (name, options) in METHODS.items()
    }
    for (mode, _), method in methods.items():
        bench.run(method, bench.prompts[:1], 24, mode=mode)  # captures
    runs: Runs = {key: [] for key in methods}
    for repeat in range(repeats):
        prompt = bench.prompts[repeat % len(bench.prompts)]
        for key, method in methods.items():
            runs[key].append(bench.run(method, [prompt], num_tokens, mode=key[0])[0])
        yield runs


def speeds(runs: Runs, mode: str) -> dict[str, Any]:
    """Columns of a form's row: medians, their ratios, and how many texts are those of its plain decoding."""
    medians = {key: statistics.median(state.stats.tokens_per_second for state in states) for key, states in runs.items()}
    plain = medians[mode, "plain"]
    found = {"plain_tokens_per_second": plain, "to_bf16": plain / medians[BF16, "plain"]}
    texts = [state.output_ids for state in runs[mode, "plain"]]
    same = 0
    for label in (label for label in METHODS if label != "plain"):
        found |= {label: medians[mode, label], f"{label}, to plain": medians[mode, label] / plain}
        same += sum(state.output_ids == text for state, text in zip(runs[mode, label], texts, strict=True))
    return found | {"same_text": f"{same} of {len(texts) * (len(METHODS) - 1)}"}


def passes(target: FastDecoder) -> dict[str, float]:
    """Milliseconds of a pass by nodes at 1,024 tokens of context: up to 64 captured, more as prompts are read."""
    cache = _cache(target, 1024)
    flat = flat_rows(cache, max(map(len, cache.pages))).to(target.device)
    rows = rows_in(flat, cache.batch_size, target.pool.page_len)
    found = {str(count): _pass_ms(target, rows, count) for count in NODES if count <= 64}

    def prompt(count: int) -> None:
        target.prefill([list(range(5, 5 + count))], target.new_cache(1))

    return found | {str(count): median_ms(lambda count=count: prompt(count), 5) for count in NODES if count > 64}


def in_mxfp4(weight: Tensor) -> Packed:
    """Any floats of 4 bits in the shape of a matrix, whose numbers do not matter."""
    draw, (num_outputs, depth) = torch.Generator("cuda").manual_seed(2), weight.shape
    data = torch.randint(0, 256, (num_outputs, depth // 2), generator=draw, device="cuda", dtype=torch.uint8)
    return Packed(data, torch.full((depth // 32, num_outputs), 119, device="cuda", dtype=torch.uint8))


def experts_in(model: ExpertModel, pack: Callable[[Tensor], FewBits]) -> tuple[LayerMatrices, LayerMatrices, Tensor]:
    """One layer's experts in few bits and the same numbers in bf16, and their router."""
    count, size, hidden = model.experts.count, model.experts.size, model.hidden_size
    draw, none = torch.Generator("cuda").manual_seed(2), torch.empty(0, 0, device="cuda")
    packed = [
        pack(torch.randn(count * outputs, depth, generator=draw, device="cuda", dtype=torch.bfloat16) / 32)
        for outputs, depth in ((2 * size, hidden), (hidden, size))
    ]
    gate_up, down = packed
    router = torch.randn(count, hidden, generator=draw, device="cuda").bfloat16()
    rest = LayerWeights(None, none, none, None, none, none, router=router)
    whole = [each.unpacked(torch.bfloat16).unflatten(0, (count, -1)) for each in packed]
    return LayerMatrices(none, none, gate_up, down, rest), LayerMatrices(none, none, whole[0], whole[1], rest), router


def expert_layers(model: ExpertModel, name: str, pack: Callable[[Tensor], FewBits]) -> dict[str, Any]:
    """Microseconds of a layer's experts by nodes, captured, in turns; the floor reads every chosen expert once."""
    few, whole, router = experts_in(model, pack)
    experts = model.experts
    found: dict[str, Any] = {}
    for count in (1, 8, 32, 128):
        x = torch.randn(
            count, model.hidden_size, generator=torch.Generator("cuda").manual_seed(count), device="cuda"
        ).bfloat16()
        chosen = (x @ router.T).topk(experts.num_chosen).indices.unique().numel()
        mine, theirs = (mlp_of(x, layer, model).sum(0) for layer in (few, whole))
        graphs = {each: replayed(partial(mlp_of, x, layer, model)) for each, layer in ((name, few), (BF16, whole))}
        times = in_turns(graphs)
        bytes_of = {name: few.gate_up.nbytes + few.down.nbytes, BF16: whole.gate_up.nbytes + whole.down.nbytes}
        floors = {each: bytes_of[each] * chosen / experts.count / BANDWIDTH * 1e6 for each in times}
        found[str(count)] = {"experts": chosen, "error": float((mine - theirs).norm() / theirs.norm())}
        found[str(count)] |= {each: {"us": times[each] * 1e3, "floor_us": floors[each]} for each in times}
        words = ", ".join(f"{each} {times[each] * 1e3:.0f} us, floor {floors[each]:.0f}" for each in times)
        print(f"{model.name}, {count} nodes: {words}; error {found[str(count)]['error']:.1e}", flush=True)
    return found


def hold_few(*models: FastDecoder) -> None:
    """Pages for this benchmark alone: a model would take half of the memory that is free."""
    for model in models:
        model.pool.hold(model.pool.pages_for(TOKENS_HELD))


def mlp_of(x: Tensor, layer: LayerMatrices, model: ExpertModel) -> Tensor:
    return experts_mlp(x, layer, model.experts, activation=model.activation, exact=False)


def replayed(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--skip-experts", action="store_true")
    parser.add_argument("--check", action="store_true", help="check the products and time experts only")
    arguments = parser.parse_args()
    rows, more = dict[str, dict[str, Any]](), dict[str, Any]()

    def keep() -> None:
        what = "quantised forms of an 8B model: a pass by nodes in milliseconds, and tokens per second at batch 1, greedy"
        document = results_head(what, script="benchmarks/gpu_quantised.py") | {"rows": list(rows.values()), **more}
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")

    forms = {name: FORMS[name] for name in arguments.forms}
    more["checks"] = {name: check(name, pack) for name, pack in forms.items()}
    if not arguments.skip_experts:
        with torch.inference_mode():
            more["experts"] = expert_layers(GPT_OSS, "mxfp4", in_mxfp4)
            few = {name: pack for name, pack in forms.items() if "w8a8" not in name}  # inputs of experts keep 16 bits
            more["experts of few bits"] = {name: expert_layers(QWEN3, name, pack) for name, pack in few.items()}
    keep()
    if not arguments.check:
        bench = Bench(context=1024)
        bench.targets[BF16], bench.drafts[BF16] = bench.targets["fast"], bench.drafts["fast"]
        bench.rounds[BF16] = bench.rounds["fast"]
        hold_few(bench.targets[BF16], bench.drafts[BF16])
        for name, pack in forms.items():
            numerics = "invariant" if "w8a8" in name else "fast"
            bench.targets[name] = FastDecoder(bench.config, rounded_weights(bench.weights, pack), numerics=numerics)
            bench.drafts[name] = FastDecoder(bench.draft_config, bench.draft_weights)
            hold_few(bench.targets[name], bench.drafts[name])
            bench.rounds[name] = Rounds(bench.targets[name])
        for mode in (BF16, *forms):
            floor = bench.targets[mode].weights.bytes_read / BANDWIDTH * 1e3
            rows[mode] = {"form": mode, "floor_ms": floor} | {f"{n} nodes": ms for n, ms in passes(bench.targets[mode]).items()}
            print(json.dumps(rows[mode]), flush=True)
            keep()
        for runs in measure(bench, list(rows), arguments.tokens, arguments.repeats):
            for mode in rows:
                rows[mode] |= speeds(runs, mode)
                print(json.dumps(rows[mode]), flush=True)
            keep()
    print(json.dumps({"rows": list(rows.values()), **more}))


if __name__ == "__main__":
    main()
