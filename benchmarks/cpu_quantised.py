"""A GPTQ folder on a CPU, multiplied as stored and dequantised: memory, milliseconds of a pass, distance of the distributions.

    PYTHONPATH=src python benchmarks/cpu_quantised.py [--group 64] [--bits 4] [--threads 1] [--repeats 15]

There are two models: random weights of SmolLM2-135M's shape, and the bundled target, whose distributions are compared on
held-out stories. Both are rounded to the nearest code, with a scale of 16 bits and a zero for every group, and written as GPTQ
folders. Memory is that of a process that opens the folder, less what it had before. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.codecs.load import load_codec
from outrider.core.tree import TokenTree
from outrider.models.load import load_model

STORIES = Path(__file__).parent / "held_out_stories.jsonl"
SHAPE = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
SHAPE |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048}
SHAPE |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16"}
NODES = (1, 4, 16)
CHILD = """
import resource, sys, torch
from outrider.models.load import load_model
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
torch.set_num_threads(1)
before = resident()
model = load_model(sys.argv[1], dtype=sys.argv[2], device='cpu')
print(resident() - before)
"""


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes along the last dimension in words of 32 bits."""
    apart = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    whole = apart.sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def gptq(stem: str, weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """The tensors of a matrix [out, in], to the nearest code."""
    most, groups = (1 << bits) - 1, weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).flatten(1)
    return {
        f"{stem}.qweight": words(codes, bits).T.contiguous(),
        f"{stem}.qzeros": words(zeros.T - 1, bits).contiguous(),
        f"{stem}.scales": scales.T.contiguous(),
        f"{stem}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }


def write(folder: Path, tensors: dict[str, Tensor], raw: dict[str, Any], *, bits: int, group: int) -> None:
    """A GPTQ folder of a model."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = (
            gptq(name.removesuffix(".weight"), tensor, bits, group) if name.endswith("proj.weight") else {name: tensor.half()}
        )
        stored |= found
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False}
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))


def random_tensors() -> dict[str, Tensor]:
    """Weights of ``SHAPE``, all of them random."""
    hidden, mlp, kv = 576, 1536, 192
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    sizes["mlp.down_proj"] = (hidden, mlp)
    found = {"model.embed_tokens.weight": torch.randn(49152, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(30):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in sizes.items()}
        found |= {f"{at}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def resident(folder: Path, dtype: str) -> int:
    """Bytes that opening the folder adds to a process."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder), dtype], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def passes(folder: Path, repeats: int) -> dict[str, dict[int, list[float]]]:
    """Milliseconds of passes, the types in turns: least and median."""
    models = {dtype: load_model(str(folder), dtype=dtype, device="cpu") for dtype in ("stored", "float32")}
    times = {(dtype, nodes): list[float]() for dtype in models for nodes in NODES}
    for _ in range(repeats):
        for (dtype, nodes), found in times.items():
            model, tree = models[dtype], TokenTree.chain(torch.arange(5, 5 + nodes)[None])
            cache, begin = model.new_cache(1), time.perf_counter()
            model.score(tree, cache)
            found.append((time.perf_counter() - begin) * 1e3)
    return {
        dtype: {nodes: [min(times[dtype, nodes]), statistics.median(times[dtype, nodes])] for nodes in NODES}
        for dtype in models
    }


def distance(folder: Path) -> dict[str, float]:
    """Next-token distributions as stored against those of float32 activations, on held-out stories."""
    codec = load_codec(bundled_path("target"))
    stored, exact = (load_model(str(folder), dtype=dtype, device="cpu") for dtype in ("stored", "float32"))
    nats, same = list[Tensor](), list[Tensor]()
    for line in STORIES.read_text(encoding="utf-8").splitlines():
        tree = TokenTree.chain(torch.tensor([codec.encode(json.loads(line)["text"])[:200]]))
        found, wanted = (model.score(tree, model.new_cache(1)).logits[0].log_softmax(-1) for model in (stored, exact))
        nats.append((wanted.exp() * (wanted - found)).sum(-1))
        same.append(found.argmax(-1) == wanted.argmax(-1))
    kl, agree = torch.cat(nats), torch.cat(same).float()
    return {"positions": len(kl), "mean_kl": float(kl.mean()), "most_kl": float(kl.max()), "same_choice": float(agree.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        large, small, form = Path(name, "large"), Path(name, "small"), {"bits": arguments.bits, "group": arguments.group}
        for folder in (large, small):
            folder.mkdir()
        write(large, random_tensors(), dict(SHAPE), **form)
        bundled = Path(bundled_path("target"))
        write(small, load_file(bundled / "model.safetensors"), json.loads((bundled / "config.json").read_text()), **form)
        for file in bundled.glob("token*"):
            shutil.copyfile(file, small / file.name)
        size = (large / "model.safetensors").stat().st_size
        memory = {dtype: resident(large, dtype) / size for dtype in ("stored", "float32")}
        results = {"file_bytes": size, "resident_to_file": memory, "pass_ms": passes(large, arguments.repeats)}
        results |= {"distance": distance(small), **form, "threads": arguments.threads}
    for dtype, found in results["pass_ms"].items():
        print(f"{dtype:<8} {memory[dtype]:.2f}x the file; ms of a pass by nodes (least, median): {found}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
