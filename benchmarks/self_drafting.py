"""Targets that draft for themselves: tokens per pass, and how good every early exit and skip set of a model is.

    python benchmarks/self_drafting.py                                 # the bundled target, greedy and temperature 1
    python benchmarks/self_drafting.py --parts                         # agreement of each exit; skip sets, searched and not
    python benchmarks/self_drafting.py --model FOLDER --prompts 12     # another model, by folder

Every method is compared with plain decoding in the same process: the texts must be equal (float32), seed for seed. A guess of a
self-drafter costs the part of the target that makes it, so tokens per pass alone say little. ``work`` is the layers run per
token, drafting included, over those of plain decoding. Below 1 a method can pay where a pass over many nodes costs as much as
one over a single node. (Heads and trials of a search are not counted.) Milliseconds are of this machine, for orientation only.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from parallel_guessing import params, prompts, report, row_of

from outrider import LLM, Method, SamplingParams
from outrider.api import RequestOutput
from outrider.core.interfaces import Drafter
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.drafters.itself.draft_verify import DraftVerify
from outrider.drafters.itself.early_exit import EarlyExit, EarlyExitTree
from outrider.drafters.itself.kangaroo import Kangaroo
from outrider.drafters.itself.skip_search import SkipSearch, SkipSpace, find_skips
from outrider.drafters.itself.swift import Swift, SwiftTree

SEARCHED = {"skip_attention": (5, 8, 10), "skip_mlp": (4, 7, 10, 11)}
"""What ``--parts --prompts 8 --max-tokens 96`` found for the bundled target at a share of 0.25, on four such prompts."""
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("early-exit", {"exit_layer": 4}),
    ("early-exit", {"exit_layer": 8}),
    ("early-exit", {"exit_layer": 12}),
    ("early-exit", {"exit_layer": 8, "branching": (4, 2, 2, 1), "num_tree_nodes": 44}),
    ("kangaroo", {"exit_layer": 8}),
    ("kangaroo", {"exit_layer": 12}),
    ("draft-verify", {}),
    ("draft-verify", {"threshold": 0.5}),
    ("draft-verify", {**SEARCHED, "threshold": 0.5}),
    ("swift", {"max_trials": 0}),
    ("swift", {}),
    ("swift", {"skip_share": 0.25, "threshold": 0.5}),
    ("swift", {"skip_share": 0.25, "threshold": 0.5, "branches": True, "num_tree_nodes": 60}),
    ("swift", {"skip_share": 0.35, "searched": True}),
    ("swift", {"skip_share": 0.35, "searched": True, "branches": True, "num_tree_nodes": 60}),
    ("del", {}),
    ("specee", {}),
    ("specee", {"threshold": 0.8}),
)
"""``searched``: begin with the set that 200 trials on four other prompts found, and keep it."""


def compare(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case on every temperature; methods with a memory keep it from prompt to prompt."""
    texts, found = prompts(arguments.prompts), []
    for temperature in arguments.temperatures:
        requests = params(len(texts), temperature, arguments.max_tokens)
        plain = llm.generate(texts, requests)
        for name, options in (("plain", {}), *CASES, *trained(arguments.predictor)):
            if arguments.methods and name not in arguments.methods:
                continue
            method = method_of(llm, name, options)
            outputs = llm.generate(texts, requests, method=method, trace=True)
            row = {"temperature": temperature, "method": name, "options": options, **row_of(outputs, plain)}
            tested = sum(output.stats.num_tested for output in outputs)
            row["accepted"] = round(sum(output.stats.num_accepted for output in outputs) / max(1, tested), 3)
            row["work"] = work_of(outputs, method.drafter)
            found.append(row)
            words = " ".join(f"{key}={value}" for key, value in options.items())
            print(f"T={temperature} {name:<13}{words:<70}{row['tokens_per_pass']:6.3f} tokens per pass, "
                  f"{row['guesses_per_pass']:4.1f} guesses, {row['accepted']:.2f} accepted, work {row['work']}, "
                  f"{row['draft_ms']:6.2f} ms draft {row['score_ms']:6.2f} ms score  {row['equal']}", flush=True)  # fmt: skip
    return found


def trained(predictor: str | None) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Cases with a predictor of early exits, if there is one."""
    return tuple(("specee", {"predictor": predictor, "threshold": tau}) for tau in (0.5, 0.8) if predictor)


def method_of(llm: LLM, name: str, options: dict[str, Any]) -> Method:
    """A case of the table; one that is to begin with a search gets it from prompts of its own."""
    given = dict(options)
    if given.pop("searched", False):
        target = llm.target
        assert isinstance(target, LayeredTarget)
        requests = SamplingParams(max_tokens=96, ignore_eos=True)
        texts = [output.prompt_token_ids + output.token_ids for output in llm.generate(prompts(24)[20:], requests)]
        memory = find_skips(target, texts, share=given["skip_share"], num_trials=200)
        assert not memory.is_active, "a finished search is kept as it is"
        given["memory"] = memory
    return llm.compose(name, **given)


def work_of(outputs: Sequence[RequestOutput], drafter: Drafter) -> float | None:
    """Layers per token, as a share of the target's: a pass per round, and a partial one per level of its tree."""
    match drafter:
        case EarlyExit() | EarlyExitTree() | Kangaroo() | DraftVerify():
            share = drafter.route.share
        case Swift() | SwiftTree():
            share = drafter.memory.route.share
        case _:
            return None
    levels = sum(_depth(seen.parents) for output in outputs for seen in output.trace)
    num_passes, num_tokens = (sum(vars(output.stats)[name] for output in outputs) for name in ("num_passes", "num_tokens"))
    return round((num_passes + share * levels) / num_tokens, 3)


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def parts(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy agreement with the whole target of every exit, and of skip sets on text they were not searched on."""
    target = llm.target
    assert isinstance(target, LayeredTarget)
    requests = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    texts = [output.prompt_token_ids + output.token_ids for output in llm.generate(prompts(arguments.prompts), requests)]
    agreement, layers = agreement_on(target, texts[len(texts) // 2 :]), target.num_layers
    found: dict[str, Any] = {
        "exits": {layer: round(agreement(Route.first(layer, layers)), 3) for layer in range(1, layers + 1)}
    }
    print("exits", found["exits"])
    for share in (0.25, 0.45):
        first = SkipSearch(SkipSpace(layers, share))
        search = find_skips(target, texts[: len(texts) // 2], share=share, num_trials=arguments.trials)
        skips = {
            kind: [layer for layer in range(layers) if not vars(search.route)[kind][layer]] for kind in ("attention", "mlp")
        }
        row = {"first": agreement(first.route), "found": agreement(search.route), "searched_on": search.score}
        found[f"skip {share}"] = {**{key: round(value, 3) for key, value in row.items()}, "taken": search.route.share, **skips}
        print(f"skip {share}", found[f"skip {share}"], flush=True)
    return found


def agreement_on(target: LayeredTarget, texts: Sequence[Sequence[int]]) -> Callable[[Route], float]:
    """How often a route says what the target says, over all positions of the texts."""
    chains = [TokenTree.chain(torch.tensor([list(text)])) for text in texts]
    wanted = [target.score(chain, target.new_cache(1)).logits.argmax(-1) for chain in chains]

    def agreement(route: Route) -> float:
        hits = [
            (target.logits(target.exit(chain, target.new_cache(1), route=route)).argmax(-1) == choice)[0]
            for chain, choice in zip(chains, wanted, strict=True)
        ]
        return float(torch.cat(hits).double().mean())

    return agreement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub name or a GGUF file; the bundled target if not given")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--methods", nargs="+", help="only these rows of the table")
    parser.add_argument("--predictor", help="folder of `outrider train specee`, for two cases more")
    parser.add_argument("--parts", action="store_true", help="measure exits and skip sets instead")
    parser.add_argument("--trials", type=int, default=200, help="skip sets tried per search")
    arguments = parser.parse_args()
    report("self_drafting", arguments, **({"parts": parts} if arguments.parts else {"methods": compare}))


if __name__ == "__main__":
    main()
