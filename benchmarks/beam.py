"""Speculative beam search against plain: levels per target pass, tokens scored per pass, seconds, and that the texts agree.

    python benchmarks/beam.py [--model NAME --draft NAME] [--beams 1 2 4 8] [--tokens 48]

Prints a table and, as its last line, one JSON document. Passes are counted, not timed; seconds are those of one run each,
in this process, one after the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import torch

from outrider import LLM, __version__
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.model.draft_model import DraftModel
from outrider.engine.beam import BeamOptions, BeamResult, beam_search
from outrider.engine.beam_forest import DrafterForest, Forest, ModelForest, NoForest

PROMPTS = [
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog went to the park. They",
    "The sun was hot and the",
]


def forests(llm: LLM, num_beams: int) -> dict[str, Forest]:
    assert llm.draft is not None, "give a draft model"
    chain = DraftModel(llm.draft, vocab_size=llm.target.vocab_size)
    return {
        "plain": NoForest(),
        **{f"model, width {x} x beams": ModelForest(llm.draft, width=x * num_beams, depth=4) for x in (1, 2, 4)},
        "greedy chain per beam": DrafterForest(chain, depth=4),
        "copied per beam": DrafterForest(PromptLookup(), depth=4),
    }


def search(llm: LLM, options: BeamOptions, forest: Forest) -> tuple[list[BeamResult], float]:
    began = time.perf_counter()
    ends = llm.codec.eos_ids
    prompts = [llm.codec.encode(prompt) for prompt in PROMPTS]
    found = [beam_search(llm.target, prompt, options=options, end_ids=ends, forest=forest) for prompt in prompts]
    return found, time.perf_counter() - began


def texts_of(found: list[BeamResult]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.token_ids for hypothesis in one.hypotheses] for one in found]


def measure(llm: LLM, num_beams: int, max_tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    reference: list[list[tuple[int, ...]]] = []
    for name, forest in forests(llm, num_beams).items():
        found, seconds = search(llm, BeamOptions(num_beams=num_beams, max_tokens=max_tokens), forest)
        reference = reference or texts_of(found)
        passes = sum(one.num_passes for one in found)
        row = {"beams": num_beams, "forest": name, "identical": texts_of(found) == reference, "seconds": round(seconds, 2)}
        row["levels_per_pass"] = round(sum(one.num_levels for one in found) / passes, 2)
        row["tokens_per_pass"] = round(sum(one.num_nodes for one in found) / passes, 1)
        speed = "{levels_per_pass:>6} levels{tokens_per_pass:>7} tokens per pass".format(**row)
        print(f"{num_beams:>2} {name:<24}{speed}{seconds:>8.2f} s  {'identical' if row['identical'] else 'DIFFERENT'}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, draft=arguments.draft, method="draft-model", dtype="float32")
    rows = [row for num_beams in arguments.beams for row in measure(llm, num_beams, arguments.tokens)]
    provenance = {"outrider": __version__, "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({**provenance, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
