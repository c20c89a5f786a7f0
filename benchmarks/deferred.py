"""Rule ``fly``, by its window: how many tokens a pass brings, and how far the greedy text is from the target's. LOSSY.

Chains of eight guesses of the draft model behind the prompts of two suites. ``distance`` is the share of emitted tokens that
are not the target's own choice after the same text: the total variation of a step at temperature 0. Neither number depends on
the machine. The exact rule comes first, and ``top-k``, which keeps near ties without looking at what follows, last.

    python benchmarks/deferred.py [--suites stories,chat] [--prompts 6 --max-tokens 96] [--model DIR --draft DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from default_policy import encoded
from unverified_exits import distance

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bench.suites import load_suites

RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("delta", {}),
    *(("fly", {"fly_window": window}) for window in (1, 2, 4, 6)),
    ("fly", {"fly_window": 2, "fly_entropy": 0.8}),
    ("top-k", {"accept_top_k": 2}),
)


def row_of(llm: LLM, asked: list[list[int]], max_tokens: int, rule: str, options: dict[str, Any]) -> dict[str, Any]:
    method = llm.compose("draft-model", acceptance=rule, policy="fixed", num_draft_tokens=8, **options)
    with torch.inference_mode():
        outputs = llm.generate(asked, SamplingParams(max_tokens=max_tokens, ignore_eos=True), method=method)
        found = distance(llm, asked, outputs)
    tokens, passes = (sum(getattr(o.stats, name) for o in outputs) for name in ("num_tokens", "num_passes"))
    return {"tokens per pass": round(tokens / passes, 3), "distance": round(found, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suites", default="stories,chat")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm, rows = LLM(args.model, draft=args.draft, dtype="float32"), list[dict[str, Any]]()
    what = "a lossy rule that takes refusals back where the target goes along, by its window, greedy, chains of eight"
    suites = {suite.name: encoded(llm, suite.first(args.prompts)) for suite in load_suites(args.suites.split(","))}
    for rule, options in RULES:
        setting = ", ".join(f"{name.removeprefix('fly_')} {value}" for name, value in options.items())
        by_suite = {name: row_of(llm, asked, args.max_tokens, rule, options) for name, asked in suites.items()}
        found = {f"{column}, {name}": value for name, row in by_suite.items() for column, value in row.items()}
        rows.append({"rule": rule, "setting": setting or "exact", **found})
        print(rows[-1], flush=True)
        keep_results(args.json, what, rows, script="benchmarks/deferred.py")


if __name__ == "__main__":
    main()
