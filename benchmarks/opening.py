"""How long a quantised GGUF file of half a billion weights takes to open, and how much memory it takes beside its size.

    python benchmarks/opening.py [--repeats 3] [--json FILE]

The file has the shapes of Qwen2.5-0.5B and the types that llama.cpp's Q4_K_M gives them: 896 inputs are no multiple of 256, so
most matrices are Q5_0 or Q8_0. Weights are random, and so is a vocabulary of the right size. Every opening is a process of its
own, which then reads a prompt of 128 tokens. Needs the package ``gguf``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.provenance import results_head
from outrider.models.native import isa_here, ready_to_measure

sys.path.insert(0, str(Path(__file__).parent))
from cpu_costs import file_mb, opening

HIDDEN, MLP, LAYERS, VOCAB, KEYS = 896, 4864, 24, 151_936, 128
BYTES = {"Q8_0": (32, 34), "Q5_0": (32, 22), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Weights of a unit, and its bytes."""
SCALES = {"Q8_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a unit has its numbers of 16 bits."""
SMALL = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)


def matrix(chance: np.random.Generator, out: int, inputs: int, kind: str) -> np.ndarray[Any, Any]:
    """Random bytes, but for small scales: [out, bytes of a row]."""
    weights, size = BYTES[kind]
    units = chance.integers(0, 256, (out, inputs // weights, size), dtype=np.uint8)
    for at in SCALES[kind]:
        units[..., at : at + 2] = SMALL
    return units.reshape(out, -1)


def matrices() -> dict[str, tuple[int, int, str]]:
    """Outputs, inputs and type of every matrix."""
    found = {"token_embd.weight": (VOCAB, HIDDEN, "Q5_0"), "output.weight": (VOCAB, HIDDEN, "Q8_0")}
    for layer in range(LAYERS):
        finer = layer % 2 == 0
        shapes = {
            "attn_q": (HIDDEN, HIDDEN, "Q5_0"),
            "attn_k": (KEYS, HIDDEN, "Q5_0"),
            "attn_v": (KEYS, HIDDEN, "Q8_0" if finer else "Q5_0"),
            "attn_output": (HIDDEN, HIDDEN, "Q5_0"),
            "ffn_gate": (MLP, HIDDEN, "Q5_0"),
            "ffn_up": (MLP, HIDDEN, "Q5_0"),
            "ffn_down": (HIDDEN, MLP, "Q6_K" if finer else "Q4_K"),
        }
        found |= {f"blk.{layer}.{stem}.weight": shape for stem, shape in shapes.items()}
    return found


def write(path: Path) -> None:
    gguf: Any = importlib.import_module("gguf")
    writer, chance = gguf.GGUFWriter(str(path), "qwen2"), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(14)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [f"t{number}" for number in range(VOCAB - len(letters) ** 2)] + [a + b for a in letters for b in letters]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([f"{a} {b}" for a in letters for b in letters])
    writer.add_eos_token_id(VOCAB - 1)
    ones, zeros = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)
    for name, (out, inputs, kind) in matrices().items():
        writer.add_tensor(name, matrix(chance, out, inputs, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            writer.add_tensor(name.replace("weight", "bias"), zeros[:out])
    for layer in range(LAYERS):
        for stem in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{stem}.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ready_to_measure()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half-billion.gguf"
        write(path)
        size, runs = file_mb(str(path)), [opening(str(path), "auto") for _ in range(args.repeats)]
    best = min(runs, key=lambda run: run["load_cpu_s"])
    what = f"opening a GGUF file of Qwen2.5-0.5B's shapes and Q4_K_M's types, random weights, {isa_here().name}, one thread"
    document = results_head(f"{what}: least CPU seconds of {args.repeats}", script="benchmarks/opening.py")
    ratios = {
        f"{name} over file": round(best[f"{key}_mb"] / size, 2)
        for name, key in (("loaded", "loaded"), ("after a prompt", "after_prompt"))
    }
    document["rows"] = [{"file, MB": size, "opening, CPU s": best["load_cpu_s"], **ratios}]
    document["measured"] = runs
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
