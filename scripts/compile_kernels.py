"""Compile the GPU's kernels for Hopper on a machine without a GPU: what does not compile is found before a device is at hand.

    PYTHONPATH=src python scripts/compile_kernels.py [sampler] [families] [quantised] [wide] [recurrent] [codes] [float8]

Needs triton. Launches are replaced by compilation alone, so results mean nothing and nothing is compared; tests/unit interprets
the same kernels for that, and tests/gpu runs them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product as pairs
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.models.few_bits import FewBits
from outrider.models.gpu import limits

COMPILED: Counter[str] = Counter()
LATENT = {"n_routed_experts": 16, "moe_intermediate_size": 192, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 128}),
    "mistral": ("mistral", {"head_dim": 128, "sliding_window": 128}),
    "phi3": ("phi3", {"head_dim": 96, "sliding_window": 130}),
    "gemma2": ("gemma2", {"head_dim": 256, "sliding_window": 128, "attn_logit_softcapping": 5.0}),
    "olmo2": ("olmo2", {"head_dim": 64}),
    "cohere2": ("cohere2", {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}),
    "stablelm": ("stablelm", {"head_dim": 80, "use_parallel_residual": True}),
    "gpt-neox": ("gpt_neox", {"head_dim": 64}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 64, "num_experts": 64, "moe_intermediate_size": 384}),
    "gpt-oss": ("gpt_oss", {"head_dim": 64, "num_local_experts": 16, "intermediate_size": 320}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "num_experts_per_tok": 6}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "num_attention_heads": 128}),
    "glm4-moe-lite": ("glm4_moe_lite", {**LATENT, "num_attention_heads": 20}),
    "minicpm3": ("minicpm3", {}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}


class NoDevice:
    """What triton asks of a driver before it compiles."""

    utils: Any = property(lambda self: self)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        del device
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132}


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    """A stand-in for ``kernel[grid]`` that compiles and does not run."""

    def call(*arguments: Any, **options: Any) -> None:
        kernel.run(*arguments, grid=grid, warmup=True, **options)
        COMPILED[kernel.fn.__name__] += 1

    return call


def sampler() -> None:
    """Choice, masks, adjustments, cuts and walk, on chains and trees, for targets and drafts."""
    from outrider.core.device_round import Frame
    from outrider.core.device_sampling import Shaping, Stages
    from outrider.device.acceptance.coupled import NOTE, RING, chain_parents, walk_and_commit
    from outrider.device.sampling.adjust import Trail
    from outrider.device.sampling.choose import Guessing, block_bests
    from outrider.device.sampling.masks import forbid, mask_bytes

    rows, nodes, vocab, cpu = 2, 4, 128_256, torch.device("cpu")
    shaping = Shaping.empty(rows, vocab, cpu)
    whole = replace(Frame.empty(rows, 1024, cpu), shaping=shaping)
    guesses, logits = torch.zeros(rows, nodes, dtype=torch.int64), torch.zeros(rows, nodes, vocab)
    words, depths = torch.ones(rows, nodes, 1, dtype=torch.int64), torch.zeros(rows, nodes, dtype=torch.int32)
    ring = torch.zeros(RING, rows, NOTE + nodes, dtype=torch.int64)
    for stages in Stages:
        frame = replace(whole, stages=stages)
        bests = block_bests(logits, frame, vocab_size=vocab, trail=Trail(guesses))
        block_bests(logits, frame, vocab_size=vocab, depths=depths, trail=Trail(guesses, words))
        one = Trail(guesses, length=2)
        block_bests(logits[:, :1].contiguous(), frame, vocab_size=vocab, depths=2, guessing=Guessing(1), trail=one)
        below = Trail(guesses, words, has_root=False)
        block_bests(logits, frame, vocab_size=vocab, depths=2, guessing=Guessing(8, tau=1.0), trail=below)
        few = torch.arange(32_000)
        fewer = Guessing(8, few, tau=1.0)
        block_bests(torch.zeros(rows, nodes, len(few)), frame, vocab_size=len(few), depths=2, guessing=fewer, trail=below)
        forbid(logits, torch.zeros(rows, nodes, mask_bytes(vocab), dtype=torch.uint8), shaping.uses, vocab_size=vocab)
        rounds = torch.zeros(rows, dtype=torch.int64)
        walk_and_commit(bests, guesses, frame, parents=chain_parents(rows, nodes, cpu), ring=ring, rounds=rounds)


def families() -> None:
    """Passes of one node, of a chain and of a tree, in both numerics, cut as behind long texts."""
    from outrider.core.tree import TokenTree
    from outrider.models.config import config_of
    from outrider.models.gpu.decoder import FastDecoder
    from outrider.models.random_decoder import random_weights

    trees = [TokenTree.chain(torch.ones(2, count, dtype=torch.int64)) for count in (1, 5)]
    trees.append(TokenTree.of_rows([([3, 4, 5, 6], [-1, 0, 0, 1])] * 2, torch.device("cpu")))
    for name, (family, changes) in FAMILIES.items():
        raw = {**SIZES, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 2048, **changes}
        config = config_of({"model_type": family, "tie_word_embeddings": False, **raw})
        assert config is not None, name
        weights = random_weights(config, dtype=torch.bfloat16, device=torch.device("cpu"))
        for numerics in ("fast", "invariant"):
            decoder = FastDecoder(config, weights, numerics=numerics)
            for tree in trees:
                cache = decoder.new_cache(2)
                cache.reserve(tree.num_nodes)
                short = decoder.step_of(tree, cache)
                decoder.forward(tree.tokens, decoder.step(short.shape, short.rows, short.sights, num_slots=4096))
        print(f"{name}: {sum(COMPILED.values())} launches of {len(COMPILED)} kernels compile", flush=True)


def quantised() -> None:
    """Products with the matrices of quantised checkpoints, through the ring and without, and their numbers in 16 bits."""
    from outrider.models.gpu.products import sixteen_bits
    from outrider.models.gpu.small_batch_matmul import Tile, product
    from outrider.models.packed import Packed

    outputs, depth = 512, 1024
    nibbles, codes = torch.zeros(outputs, depth // 2, dtype=torch.uint8), torch.zeros(outputs, depth, dtype=torch.int8)
    floats, zeros = codes.to(torch.float8_e4m3fn), torch.zeros(depth // 128, outputs, dtype=torch.bfloat16)
    few = zeros.half()
    forms = [Packed(nibbles, few), Packed(nibbles, few, zeros), Packed(nibbles, few.float(), zeros)]
    forms += [Packed(floats, torch.ones(1, outputs)), Packed(floats, few.float()), Packed(codes, few)]
    half = torch.zeros(depth // 64, outputs)
    forms += [Packed(nibbles, half, levels=torch.arange(16.0)), Packed(nibbles, half.half(), half.bfloat16())]
    x = torch.zeros(64, depth, dtype=torch.bfloat16)
    for packed in forms:
        for bm, bn, bk, warps in ((8, 64, 256, 4), (16, 64, 128, 4), (64, 128, 128, 8)):
            for ringed in (True, False):
                tile = Tile(bn, bk, warps, 3, max(bm, 8 if ringed else 16), 2, ringed=ringed)
                product(x[:bm], packed, tile=tile)
                product(x[:bm], packed, tile=replace(tile, num_parts=1), gated=True)
        sixteen_bits(packed, torch.bfloat16)
    small = torch.zeros(depth // 32, outputs, dtype=torch.bfloat16)
    product(x, Packed(nibbles, small.half(), small), tile=Tile(64, 128, bm=64))
    table = Packed(nibbles, torch.zeros(depth // 64, outputs), levels=torch.zeros(16))
    for bm in (16, 64):
        product(x[:bm], table, tile=Tile(64, 128, bm=bm), gated=True)
        product(x[:bm], table, tile=Tile(64, 128, bm=bm, num_parts=2))
    sixteen_bits(table, torch.bfloat16)
    sixteen_bits(Packed(nibbles, small.half(), small), torch.bfloat16)
    stored_blocks(x)
    experts_of_few_bits(depth)


def float8() -> None:
    """Products of e4m3 floats with rounded inputs: few rows and many, with the copy engine and without."""
    from outrider.models.gpu.finish import SILU, Finish
    from outrider.models.gpu.float8_matmul import multiply_float8
    from outrider.models.gpu.tiles import Kind
    from outrider.models.packed import Packed

    outputs, depth = 512, 1024
    floats = torch.zeros(outputs, depth, dtype=torch.float8_e4m3fn)
    forms = [Packed(floats, torch.ones(groups, outputs), rounds_inputs=True) for groups in (1, depth // 128)]
    for (count, packed), kind in pairs(pairs((1, 32, 64, 512, 1024), forms), Kind):
        x, gated = torch.zeros(count, depth, dtype=torch.bfloat16), kind is Kind.GATED
        multiply_float8(x, packed, kind, gated=gated, finish=SILU if gated else Finish("none"), out_dtype=x.dtype)


def stored_blocks(x: torch.Tensor) -> None:
    """Products of every kind with matrices of every storage type of GGUF, and rows of them written out."""
    from outrider.models.gguf.quants import STORAGE_TYPES
    from outrider.models.gguf.reader import TensorEntry
    from outrider.models.gpu.planes_matmul import written_out
    from outrider.models.gpu.products import multiply
    from outrider.models.gpu.tiles import Kind
    from outrider.models.quantised.gguf_planes import LAYOUTS, planes_of

    for storage in STORAGE_TYPES.values():
        if storage.name in LAYOUTS:
            entry = TensorEntry("m", (512, x.shape[1]), storage, 0)
            planes = planes_of(torch.zeros(512, storage.num_bytes(x.shape[1]), dtype=torch.uint8), entry)
            for count, kind in pairs((1, 32, 64), Kind):
                multiply(x[:count], planes, kind)
            written_out(planes, torch.bfloat16, torch.zeros(3, dtype=torch.int64))


def experts_of_few_bits(depth: int) -> None:
    """Grouped products of one node and of many, with gates and without, in every form that experts have."""
    from outrider.models.gguf.quants import STORAGE_TYPES
    from outrider.models.gguf.reader import TensorEntry
    from outrider.models.packed import Packed
    from outrider.models.quantised.gguf_planes import LAYOUTS, planes_of

    count, outputs = 8, 256
    rows = 2 * count * outputs
    nibbles, codes = torch.zeros(rows, depth // 2, dtype=torch.uint8), torch.zeros(rows, depth, dtype=torch.int8)

    def scales(group: int) -> torch.Tensor:
        return torch.zeros(depth // group, rows, dtype=torch.float16)

    zeros = scales(128).bfloat16()
    forms: list[FewBits] = [Packed(nibbles, scales(128)), Packed(nibbles, scales(128), zeros), Packed(nibbles, scales(32))]
    forms += [Packed(nibbles, scales(64).float(), levels=torch.zeros(16)), Packed(nibbles, scales(32).to(torch.uint8))]
    forms += [Packed(codes, scales(depth)), Packed(codes.to(torch.float8_e4m3fn), scales(128)), Packed(codes, scales(32))]
    for storage in STORAGE_TYPES.values():
        if storage.name in LAYOUTS:
            entry = TensorEntry("m", (rows, depth), storage, 0)
            forms.append(planes_of(torch.zeros(rows, storage.num_bytes(depth), dtype=torch.uint8), entry))
    for weight in forms:
        one_expert_product(weight, count, outputs)


def one_expert_product(weight: FewBits, count: int, outputs: int) -> None:
    from outrider.models.gpu.expert_products import ExpertBlocks, expert_product

    depth, per_row = weight.shape[1], 4
    for rows, block in ((1, 16), (128, 64)):
        num_pairs = rows * per_row
        index, pairs = torch.zeros(count, dtype=torch.int32), torch.zeros(count, block, dtype=torch.int32)
        blocks = ExpertBlocks(torch.ones(num_pairs), index, pairs)
        bias = torch.zeros(2 * count * outputs, dtype=torch.bfloat16)
        x = torch.zeros(num_pairs, depth, dtype=torch.bfloat16)
        gated = torch.zeros(num_pairs, outputs, dtype=torch.bfloat16)
        expert_product(x, weight, bias, gated, blocks, per_row=per_row, activation="clamped")
        expert_product(x, weight, None, torch.zeros(per_row, rows, 2 * outputs), blocks, per_row=per_row, activation=None)


def wide() -> None:
    """Products of more than 64 rows, and attention that folds pieces, over chains and trees."""
    from outrider.models.attention.tree_tiles import Bounds, KeySplit, Rows, Sights
    from outrider.models.attention.tree_triton import attend_tree
    from outrider.models.gpu.finish import SILU, Finish
    from outrider.models.gpu.tile import Tile
    from outrider.models.gpu.wide import wide_product

    x, weight = torch.zeros(320, 512, dtype=torch.bfloat16), torch.zeros(512, 512, dtype=torch.bfloat16)
    cases = [(64, 64, SILU, True), (128, 192, Finish("gelu_tanh", weight[0]), True), (64, 320, Finish("gelu"), False)]
    for bn, bm, finish, gated in [*cases, (128, 96, Finish("none"), False), (128, 256, Finish("none"), False)]:
        out = torch.zeros(320, 256 if gated else 512, dtype=torch.bfloat16)
        wide_product(x, weight, out, tile=Tile(bn, 64, bm=bm, is_wide=True), finish=finish, gated=gated, part_len=512)
    queries, memory = torch.zeros(2, 4, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 2, 4096, 128, dtype=torch.bfloat16)
    row = torch.zeros(2, dtype=torch.int32)
    nodes = torch.zeros(2, 4, 4, dtype=torch.int32)
    paged, pages = Rows(row, torch.zeros(2, 64, dtype=torch.int32), 64), memory.view(2, -1, 2, 64, 128)
    tree = Sights(nodes[:, :, :1].long().contiguous(), nodes[:, :, 0].contiguous(), 0, nodes)
    for sights in (Sights(None, None), tree):
        for (block, rows), window in pairs(((memory, Rows(row, row)), (pages, paged)), (0, 100)):
            cut = KeySplit(5, 256, 2, block_queries=64, folds_above=1024)
            attend_tree(queries, (block[0], block[1]), rows, sights=sights, cut=cut, scale=1.0, bounds=Bounds(window))


def codes() -> None:
    """Keys and values in 8 bits, written and read, with tiles fetched by the copy engine and without, over chains and trees."""
    from outrider.cache.page_pool import LayerPages
    from outrider.core.key_storage import STORAGES
    from outrider.models.attention import tree_triton
    from outrider.models.attention.tree_cut import cut_for
    from outrider.models.attention.tree_tiles import Bounds, KeySplit, Rows, Sights
    from outrider.models.attention.tree_triton import attend_tree, rotate_and_write

    lengths, nodes = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, 4, dtype=torch.int32)
    rows, tree = (
        Rows(lengths, torch.zeros(2, 64, dtype=torch.int32), 64),
        Sights(nodes[..., :1].long(), nodes[..., 0], 0, nodes),
    )
    exact, fast = (cut_for(2, 16, num_kv_heads=2, capacity=8192, invariant=flag) for flag in (True, False))
    looks = [(exact, Bounds()), (exact, Bounds(128, 5.0)), (replace(fast, block_keys=64), Bounds())]
    looks.append((KeySplit(1, block_queries=64), Bounds()))
    for storage, (dim, copied) in pairs(
        (s for s in STORAGES.values() if s.is_rounded), ((64, True), (128, True), (128, False))
    ):
        tree_triton.can_copy = lambda *_, copied=copied: copied
        codes = torch.zeros(2, 128, 2, 64, dim).to(storage.codes)
        memory = LayerPages(*codes, *torch.zeros(2, 128, 2, 64), torch.bfloat16)
        qkv, table = torch.zeros(2, 4, 12 * dim), torch.zeros(4096, dim, dtype=torch.bfloat16)
        for sights, (cut, bounds) in pairs((Sights(None, None), tree), looks):
            queries = rotate_and_write(qkv, memory, rows, sights=sights, tables=(table, table))
            attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=1.0, bounds=bounds)
        print(f"{storage.name}, heads of {dim}: {sum(COMPILED.values())} launches compile", flush=True)


def recurrent() -> None:
    """Scans of Mamba-2 and gated delta layers of real sizes, over chains and trees, with and without a log."""
    from outrider.core.tree import TokenTree
    from outrider.models.recurrent import delta_mixer, mamba_mixer
    from outrider.models.recurrent.delta_triton import TritonDelta
    from outrider.models.recurrent.mamba_triton import TritonMamba
    from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

    def always(scan: Any) -> Any:
        return lambda shape, numbers, **_: scan(shape, numbers)

    mamba_mixer.mamba_scan, delta_mixer.delta_scan = always(TritonMamba), always(TritonDelta)
    mamba = {"num_heads": 4, "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 1}
    delta = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 2}
    raws = [*(tiny_raw("mamba2", **mamba, use_conv_bias=bias) for bias in (True, False)), tiny_raw("qwen3_next", **delta)]
    for dtype, raw in pairs((torch.bfloat16, torch.float32), raws):
        model = random_recurrent(raw, dtype=dtype)
        cache = model.new_cache(1)
        for tree in (TokenTree.chain(torch.tensor([[5]])), TokenTree.of_rows([([5, 6, 7], [-1, 0, 0])])):
            model.score(tree, cache)
            cache.commit([[0]])


def main() -> None:
    parts = {"sampler": sampler, "families": families, "quantised": quantised, "wide": wide, "recurrent": recurrent}
    parts |= {"codes": codes, "float8": float8}
    driver.set_active(NoDevice())
    limits.HOPPER = True  # before the modules with kernels take it over
    JITFunction.__getitem__ = compile_only
    for name in sys.argv[1:] or parts:
        parts[name]()
        print(f"{name}: {sum(COMPILED.values())} launches of {len(COMPILED)} kernels compile with triton {triton.__version__}")


if __name__ == "__main__":
    main()
