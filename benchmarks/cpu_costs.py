"""What passes, prompts and memory cost on a CPU, and their floors: the parts of benchmarks/cpu.py.

Times are CPU milliseconds of this process, the least of several, since a machine may be shared. A floor is the larger of two
times: bytes over the speed of a plain sum, and multiply-adds over the rate of the type's product.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.config import ModelConfig
from outrider.models.native import isa_here

NODES: tuple[int, ...] = (1, 4, 16, 64)
CONTEXT = 128
DOT_PRODUCTS = {"neon_dot": 4, "neon_i8mm": 8, "neon_bf16": 8, "avx512_vnni": 4, "avx512_bf16": 4, "amx": 32}
"""Products of 8 bits for each product of floats, where the set has an instruction for them. A tile makes 1,024 a cycle, where
vectors of floats make 32."""
SHORT_SUMS = {"avx2": 32 / 17, "avx512": 32 / 17}
"""Weights of 4 bits where sums take instructions of their own (``core_rates.py``). Those of 8 bits are as slow as
floats there."""
TILE_PRODUCTS = {"amx": 16}
"""Products of bfloat16 in tiles for each product of floats."""
BFLOAT16_PRODUCTS = TILE_PRODUCTS | {"avx512_bf16": 0.5, "neon_bf16": 2}
"""Products of bfloat16 in tiles or in pairs of inputs for each product of floats. Half is the rate of a Xeon with AMX
(``core_rates.py``). That of NEON is not measured."""
WHOLE = ("auto", "stored", "w8a8", "int4")
"""Types whose products are those of whole numbers, where the file has no more than a byte for a weight."""
CHILD = """
import resource, sys, time, torch
from outrider.models.load import load_model
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
torch.set_num_threads(1)
before, began = resident(), time.process_time()
model = load_model(sys.argv[1], dtype=sys.argv[2], device='cpu')
seconds, added = time.process_time() - began, resident() - before
model.prefill([[5 + i % 900 for i in range(128)]], model.new_cache(1))
print(seconds, before, added, resident() - before)
"""


def prompt_of(length: int) -> list[int]:
    """Tokens that every vocabulary has."""
    return [5 + i % 900 for i in range(length)]


def cpu_ms(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


@dataclass(frozen=True)
class Rates:
    """What one thread of this machine can do in a millisecond of its own time."""

    bytes_read: float
    multiply_adds: float
    """Multiply-adds per second in float32, measured with a large product of PyTorch."""

    @staticmethod
    def measured() -> Rates:
        numbers, x, w = torch.ones(1 << 26), torch.randn(512, 1024), torch.randn(1024, 1024)
        read = numbers.nbytes / min(cpu_ms(numbers.sum) for _ in range(5))
        return Rates(read, x.numel() * 1024 / min(cpu_ms(lambda: x @ w) for _ in range(6)))

    def floor_ms(self, num_bytes: float, num_products: float, *, at_once: float) -> float:
        """The least time of a pass that multiplies ``at_once`` numbers where it would multiply one float."""
        return max(num_bytes / self.bytes_read, num_products / (at_once * self.multiply_adds))


def layer_weights(config: ModelConfig) -> int:
    """What a token of a prompt is multiplied with."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * config.num_layers * (heads + 3 * config.mlp_size)


def num_weights(config: ModelConfig) -> int:
    """What a pass over one node multiplies with."""
    return layer_weights(config) + config.hidden_size * config.vocab_size


def products_at_once(dtype: str, bytes_of_weight: float) -> float:
    """Products of a type for each product of floats. Whole numbers have dot products. F16 as stored is added in 16 bits where
    the set does so. Tiles multiply bfloat16, and ``int8`` as bfloat16. Some sets multiply bfloat16 in pairs. Other floats of 16
    bits are multiplied as float32."""
    isa = isa_here()
    if dtype in WHOLE and bytes_of_weight < 1.2:
        short = SHORT_SUMS.get(isa.name, 1) if bytes_of_weight < 0.8 else 1
        return DOT_PRODUCTS.get(isa.name, short)
    if dtype == "int8":
        return TILE_PRODUCTS.get(isa.name, 1)
    if dtype == "bfloat16" or (dtype == "auto" and bytes_of_weight < 2.2 and not isa.adds_halves):
        return 1 if dtype == "auto" and isa.reads_halves else BFLOAT16_PRODUCTS.get(isa.name, 1)
    return 2 if dtype in ("auto", "stored") and bytes_of_weight < 2.2 and isa.adds_halves else 1


def pass_costs(models: Mapping[str, Target], repeats: int, context: int = CONTEXT) -> dict[str, dict[int, float]]:
    """A pass over a chain of nodes after a prompt of ``context`` tokens, models in turns."""
    caches = {name: model.new_cache(1) for name, model in models.items()}
    for name, model in models.items():
        model.prefill([prompt_of(context)], caches[name])
    trees = {nodes: TokenTree.chain(torch.arange(5, 5 + nodes)[None]) for nodes in NODES}
    least = {name: dict.fromkeys(NODES, float("inf")) for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            for nodes, tree in trees.items():
                spent = cpu_ms(lambda model=model, tree=tree, name=name: model.score(tree, caches[name]))
                least[name][nodes] = min(least[name][nodes], spent)
    return least


def prompt_costs(models: Mapping[str, Target], lengths: Sequence[int], repeats: int) -> dict[str, dict[int, float]]:
    """A prompt of each length into an empty cache, models in turns."""
    least = {name: dict.fromkeys(lengths, float("inf")) for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            for length in lengths:
                cache, prompt = model.new_cache(1), [prompt_of(length)]
                spent = cpu_ms(lambda model=model, cache=cache, prompt=prompt: model.prefill(prompt, cache))
                least[name][length] = min(least[name][length], spent)
    return least


def opening(path: str, dtype: str) -> dict[str, float]:
    """Loading and memory of a process that does nothing else; ``interpreter_mb`` is what it has before."""
    command = [sys.executable, "-c", CHILD, path, dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    seconds, before, added, after = map(float, run.stdout.split())
    return {
        "load_cpu_s": round(seconds, 2),
        "interpreter_mb": round(before / 1e6),
        "loaded_mb": round(added / 1e6),
        "after_prompt_mb": round(after / 1e6),
    }


def file_mb(path: str) -> float:
    """The weights' size on disk."""
    files: Sequence[Path] = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("*.safetensors"))
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)
