"""What heads of 8 and 4 bits are worth: tokens per pass and bytes of the bundled heads, beside the whole ones.

python recipes/rounded_heads.py --json benchmarks/results/rounded_heads.json              # some minutes on a CPU
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.models.heads import load_head
from outrider.models.heads.frozen import RoundedHeadLinear, quicken


def kilobytes(folder: str, bits: int) -> float:
    """Kilobytes of the matrices of heads for the bundled target, in 16 bits where they are not rounded."""
    head = load_head(folder, ends=bundled_path("target"))
    if bits == 16:
        return sum(p.numel() * 2 for name, p in head.named_parameters() if p.dim() == 2 and "embed" not in name) / 1e3
    rounded = [module for module in quicken(head, bits).modules() if isinstance(module, RoundedHeadLinear)]
    scales = sum(module.packed.scales.numel() * 2 for module in rounded)
    return (sum(module.packed.data.nbytes for module in rounded) + scales) / 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(method="plain", dtype="float32", max_batch_size=8)
    each = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed) for seed in range(arguments.prompts)]
    prompts = [output.token_ids for output in llm.generate([[0]] * arguments.prompts, each)]
    params = SamplingParams(max_tokens=arguments.tokens)
    plain = [output.token_ids for output in llm.generate(prompts, params)]
    rows = list[dict[str, Any]]()
    for kind in ("medusa", "hydra", "eagle1", "eagle3"):
        row: dict[str, Any] = {"heads": kind}
        for bits in (16, 8, 4):
            method = llm.compose(kind, bits=bits, branching="chain", num_draft_tokens=4)
            outputs = llm.generate(prompts, params, method=method)
            assert [output.token_ids for output in outputs] == plain, "lossless"
            rate = sum(o.stats.num_tokens for o in outputs) / sum(o.stats.num_passes for o in outputs)
            row |= {f"{bits} bits, tokens per pass": round(rate, 2)}
            row |= {f"{bits} bits, MB": round(kilobytes(bundled_path(f"heads/{kind}"), bits) / 1e3, 1)}
        rows.append(row)
        print(row, flush=True)
    what = "heads of fewer bits on the bundled target: tokens per pass, greedy, chains of four; all texts equal plain decoding"
    keep_results(arguments.json, what, rows, script="recipes/rounded_heads.py")


if __name__ == "__main__":
    main()
