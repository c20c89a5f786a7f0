"""SpecEE without verification: how many tokens a whole pass brings, and how far the text is from the target's. LOSSY.

Greedy texts of story prompts, with rule ``delta`` (verified) and ``unverified``. ``distance`` is the share of emitted tokens
that are not the target's own choice after the same text: the total variation of a step at temperature 0. Neither number
depends on the machine. The last line is one JSON document.

    python benchmarks/unverified_exits.py [--predictor runs/specee] [--thresholds 0.5,0.8,0.95] [--prompts 6 --max-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch
from parallel_guessing import prompts

from outrider import LLM, SamplingParams
from outrider.api import RequestOutput


def distance(llm: LLM, asked: list[list[int]], outputs: list[RequestOutput]) -> float:
    """Share of tokens that the target would not have chosen."""
    wrong = total = 0
    for prompt, output in zip(asked, outputs, strict=True):
        text, last = [*prompt, *output.token_ids], llm.target.num_layers
        states = llm.target.prefill([text[:-1]], llm.target.new_cache(1), taps=(last,))[last][0]
        chosen = llm.target.logits(states[None, len(prompt) - 1 :]).argmax(-1)[0].tolist()
        wrong += sum(a != b for a, b in zip(chosen, output.token_ids, strict=True))
        total += len(output.token_ids)
    return wrong / total


def row_of(llm: LLM, asked: list[list[int]], arguments: argparse.Namespace, threshold: float, rule: str) -> dict[str, Any]:
    options = {"predictor": arguments.predictor} if arguments.predictor else {}
    method = llm.compose("specee", acceptance=rule, policy="fixed", threshold=threshold, num_draft_tokens=6, **options)
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    with torch.inference_mode():
        outputs = llm.generate(asked, params, method=method)
        found = distance(llm, asked, outputs)
    passes = sum(o.stats.num_passes for o in outputs)
    return {
        "threshold": threshold,
        "rule": rule,
        "tokens_per_pass": round(sum(o.stats.num_tokens for o in outputs) / passes, 3),
        "distance": round(found, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--predictor", help="folder of `outrider train specee`; none: the sureness of the exits")
    parser.add_argument("--thresholds", default="0.5,0.8,0.95")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, method="plain", dtype="float32")
    asked = [llm.codec.encode(text) for text in prompts(arguments.prompts)]
    found = []
    for threshold in map(float, arguments.thresholds.split(",")):
        for rule in ("delta", "unverified"):
            found.append(row_of(llm, asked, arguments, threshold, rule))
            print(found[-1], flush=True)
    print(json.dumps({"machine": platform.machine(), "predictor": arguments.predictor, "rows": found}))


if __name__ == "__main__":
    main()
