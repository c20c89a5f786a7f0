"""Tokens per pass of sampled text in the transformers drop-in: torch's random numbers against the engine's own.

    python benchmarks/drop_in_noise.py [--prompts 12] [-n 64] [--out FILE]

The bundled pair continues prompts of the suite `chat` at temperature 1. With torch's numbers every text is compared with
that of plain `generate`. CPU seconds are counted, since they do not depend on who else uses the machine. The exit code is 1
if a text differs.
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
from outrider.bundled import bundled_path

METHODS = ("draft-model", "best-first", "suffix", "token-recycling", "pearl")


def measured(model: Any, draft: Any, prompts: list[torch.Tensor], method: str, noise: str, max_tokens: int) -> dict[str, Any]:
    """One method with one source of numbers."""
    needs_draft = method in ("draft-model", "best-first", "pearl")
    loop = outrider.transformers.generate(method, draft=draft if needs_draft else None, num_draft_tokens=4, noise=noise)
    how = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": True, "top_k": 50}
    tokens, passes, different, seconds = 0, 0, 0, 0.0
    for seed, prompt in enumerate(prompts):
        torch.manual_seed(seed)
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        torch.manual_seed(seed)
        began = time.process_time()
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how, custom_generate=loop)
        seconds += time.process_time() - began
        tokens, passes = tokens + max_tokens, passes + loop.stats[0].num_passes
        different += not torch.equal(found, expected)
    row = {"method": method, "noise": noise, "tokens_per_pass": tokens / passes, "cpu_s": seconds, "texts": len(prompts)}
    return {**row, "different": different}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", "-n", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    model, draft = (
        AutoModelForCausalLM.from_pretrained(bundled_path(name), dtype=torch.float32).eval() for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("target"))
    turns = [item.turns[0] for item in load_suites(["chat"])[0].items[: arguments.prompts]]
    prompts = [tokenizer(turn, return_tensors="pt").input_ids for turn in turns]
    rows = [
        measured(model, draft, prompts, method, noise, arguments.max_tokens) for method in METHODS for noise in ("torch", "own")
    ]
    title = "sampled text in the transformers drop-in with torch's random numbers and the engine's"
    told = results_head(title, script="benchmarks/drop_in_noise.py") | {"rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 1 if any(row["different"] for row in rows if row["noise"] == "torch") else 0


if __name__ == "__main__":
    sys.exit(main())
