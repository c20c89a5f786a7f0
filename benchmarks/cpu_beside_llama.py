"""CPU time of a prompt and of greedy tokens on one GGUF file: ours as stored and llama.cpp, in turns, on one thread.

    PYTHONPATH=src:FOLDER python benchmarks/cpu_beside_llama.py FILE [--rounds 3] [--tokens 24] [--json FILE]

FOLDER holds llama-cpp-python. A machine may be shared, so the least CPU time of the process counts, not the clock. The floor is
the bytes of the matrices over the speed of a plain sum. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import results_head
from outrider.core.tree import TokenTree
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder, ready_to_measure

PROMPT = [5 + i % 900 for i in range(128)]


def ours(model: NativeDecoder, count: int) -> tuple[float, list[float], list[int]]:
    """CPU milliseconds of the prompt but its last token, those of each greedy token, and the tokens."""
    cache, tokens, spent = model.new_cache(1), [PROMPT[-1]], list[float]()
    began = time.process_time()
    model.prefill([PROMPT[:-1]], cache)
    prompt = 1e3 * (time.process_time() - began)
    for _ in range(count):
        began = time.process_time()
        tokens.append(int(model.score(TokenTree.chain(torch.tensor([tokens[-1:]])), cache).logits[0, 0].argmax()))
        cache.commit([[0]])
        spent.append(1e3 * (time.process_time() - began))
    return prompt, spent, tokens[1:]


def theirs(engine: Any, count: int) -> tuple[float, list[float], list[int]]:
    """The same of llama.cpp; its prompt includes the last token."""
    tokens, spent = list[int](), list[float]()
    engine.reset()
    began = time.process_time()
    for token in engine.generate(PROMPT, temp=0.0, reset=True):
        spent.append(1e3 * (time.process_time() - began))
        tokens.append(int(token))
        if len(tokens) == count:
            break
        began = time.process_time()
    return spent[0], spent[1:], tokens


def bytes_per_ms() -> float:
    """Bytes that this thread reads from memory in a millisecond of its own time, beyond any cache."""
    numbers, least = torch.ones(1 << 25), float("inf")
    for _ in range(4):
        began = time.process_time()
        numbers.sum()
        least = min(least, 1e3 * (time.process_time() - began))
    return numbers.nbytes / least


def main() -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ready_to_measure()
    model = load_model(str(args.file), dtype="stored", device="cpu")
    assert isinstance(model, NativeDecoder), "the native pass multiplies stored matrices"
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    engine = llama_cpp.Llama(str(args.file), **options)
    runs: dict[str, list[tuple[float, list[float], list[int]]]] = {"ours": [], "llama.cpp": []}
    for _ in range(args.rounds):
        runs["ours"].append(ours(model, args.tokens))
        runs["llama.cpp"].append(theirs(engine, args.tokens))
    same = sum(a == b for a, b in zip(runs["ours"][0][2], runs["llama.cpp"][0][2], strict=True))
    rows: list[dict[str, Any]] = [
        {
            "engine": name,
            "prompt_ms": round(min(run[0] for run in found), 1),
            "token_ms_least": round(min(min(run[1]) for run in found), 2),
            "token_ms_median": round(statistics.median(ms for run in found for ms in run[1]), 2),
        }
        for name, found in runs.items()
    ]
    rows.append({"engine": "floor of bytes", "token_ms_least": round(model.num_bytes / bytes_per_ms(), 2)})
    what = (
        f"CPU ms of 128 tokens and of greedy tokens, one thread; llama-cpp-python {llama_cpp.__version__}; same tokens {same}"
    )
    document = results_head(what, script="benchmarks/cpu_beside_llama.py")
    document["command"] = " ".join(Path(word).name if word.endswith(".gguf") else word for word in document["command"].split())
    document["rows"] = rows
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(*map(json.dumps, rows), json.dumps(document), sep="\n")


if __name__ == "__main__":
    main()
