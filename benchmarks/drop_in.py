"""The transformers drop-in on prompts that are edited: CPU seconds of `generate` with and without it, in one process.

    python benchmarks/drop_in.py MODEL [--gguf FILE] [--dtypes float32 bfloat16] [--prompts 3] [--shortest] [-n 64]
                                       [--rounds 3] [--out FILE]

MODEL is a folder that transformers opens; with --gguf it opens that file of the folder. Both runs are greedy and take turns.
Every prompt counts at its fastest. CPU seconds are counted, since they do not depend on who else uses the machine; run it with
OMP_NUM_THREADS=1. The last line is JSON. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider.transformers
from outrider.bench.provenance import results_head
from outrider.bench.suites import load_suites


def compared(model: Any, prompts: list[torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every prompt at its fastest, and how many texts differ."""
    how = {"max_new_tokens": arguments.max_tokens, "min_new_tokens": arguments.max_tokens, "do_sample": False}
    runs: dict[str, dict[str, Any]] = {"plain": {}, arguments.method: {}}
    runs[arguments.method] = {"custom_generate": outrider.transformers.generate(method=arguments.method)}
    seconds: dict[str, list[float]] = {name: [float("inf")] * len(prompts) for name in runs}
    texts: dict[str, list[Any]] = {name: [None] * len(prompts) for name in runs}
    for _ in range(arguments.rounds):
        for index, prompt in enumerate(prompts):
            for name, extra in runs.items():
                began = time.process_time()
                found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how, **extra)
                taken = time.process_time() - began
                print(f"prompt {index}, {name}: {taken:.2f} s", file=sys.stderr, flush=True)
                seconds[name][index] = min(seconds[name][index], taken)
                texts[name][index] = found[0].tolist()
    plain, ours = sum(seconds["plain"]), sum(seconds[arguments.method])
    different = sum(mine != theirs for mine, theirs in zip(texts[arguments.method], texts["plain"], strict=True))
    sizes = {"prompts": len(prompts), "prompt_tokens": sum(prompt.shape[1] for prompt in prompts)}
    return {"plain_cpu_s": plain, "ours_cpu_s": ours, "speedup": plain / ours, "different": different, **sizes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf", help="a file of that folder")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--shortest", action="store_true", help="take the shortest prompts, where PyTorch reads them slowly")
    parser.add_argument("--max-tokens", "-n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    file = {"gguf_file": arguments.gguf} if arguments.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **file)
    suite = load_suites(["editing"])[0]
    items = sorted(suite.items, key=lambda item: len(item.turns[0])) if arguments.shortest else suite.items
    asked = [[{"role": "user", "content": item.turns[0]}] for item in items[: arguments.prompts]]
    chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for messages in asked]
    prompts = [tokenizer(chat, return_tensors="pt", add_special_tokens=False).input_ids for chat in chats]
    rows = []
    for dtype in arguments.dtypes:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype), **file).eval()
        rows.append({"dtype": dtype, "method": arguments.method, **compared(model, prompts, arguments)})
        print(rows[-1], file=sys.stderr, flush=True)
    told = results_head("transformers' generate with and without the drop-in", script="benchmarks/drop_in.py") | {"rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
