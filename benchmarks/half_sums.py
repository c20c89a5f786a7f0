"""How far sums of 16 bits move the laws of an F16 GGUF file: ours as stored, and llama.cpp where it imports, against float32.

    python benchmarks/half_sums.py FILE.gguf [--tokens 256] [--json FILE]

Every engine reads the same text token by token. Its next-token laws are compared with those of the same weights multiplied in
float32, whose own rounding is a thousand times finer. The engine llama.cpp keeps its cache in float32 here, so that sums alone
differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import LLM
from outrider.bench.provenance import results_head
from outrider.core.tree import TokenTree

TEXT = Path(__file__).parents[1] / "README.md"
_GGML_F32 = 0


def own_logits(path: str, dtype: str, tokens: list[int]) -> Tensor:
    """[tokens, vocabulary], pass after pass of one node."""
    target, found = LLM(path, dtype=dtype).target, list[Tensor]()
    cache = target.new_cache(1)
    for token in tokens:
        found.append(target.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0, 0].clone())
        cache.commit([[0]])
    return torch.stack(found)


def llama_cpp_logits(path: str, tokens: list[int]) -> tuple[str, Tensor] | None:
    """Name and logits of llama.cpp; None if it cannot be imported."""
    try:
        llama_cpp: Any = importlib.import_module("llama_cpp")
    except ImportError:
        return None
    options = {"n_ctx": len(tokens) + 1, "n_threads": 1, "type_k": _GGML_F32, "type_v": _GGML_F32, "logits_all": True}
    engine, found = llama_cpp.Llama(path, verbose=False, **options), list[Tensor]()
    for number, token in enumerate(tokens):
        engine.eval([token])
        found.append(torch.from_numpy(engine.scores[number].copy()))
    return f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", torch.stack(found)


def distances(name: str, found: Tensor, exact: Tensor) -> dict[str, Any]:
    """Distances of laws from the exact ones, over positions."""
    law, other = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    divergences = (law.exp() * (law - other)).sum(-1)
    return {
        "engine": name,
        "KL, mean": float(f"{divergences.mean():.3g}"),
        "KL, largest": float(f"{divergences.max():.3g}"),
        "error of logits, relative": float(f"{(found - exact).norm() / exact.norm():.3g}"),
        "same likeliest token": round(float((found.argmax(-1) == exact.argmax(-1)).double().mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = LLM(args.model).codec.encode(TEXT.read_text())[: args.tokens]
    exact = own_logits(args.model, "float32", tokens)
    rows = [distances("ours, sums of 16 bits for 32 inputs", own_logits(args.model, "stored", tokens), exact)]
    peer = llama_cpp_logits(args.model, tokens)
    rows += [] if peer is None else [distances(*peer, exact)]
    what = f"Next-token laws of an F16 file against float32, {len(tokens)} positions of the README"
    document = results_head(what, script="benchmarks/half_sums.py")
    document["command"] = " ".join(Path(word).name if word.endswith(".gguf") else word for word in document["command"].split())
    document["rows"] = rows
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
