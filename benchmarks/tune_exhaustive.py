"""Is `outrider tune` within 5 % of the best setting that an exhaustive search finds?

    python benchmarks/tune_exhaustive.py [--suites stories,extraction,chat] [--lengths 1,2,3,4,5,6,8,10] [--rounds 5]

For each suite: tunes, then measures the winner beside every lossless method at every length (trees at several sizes) and both
policies, in turns, and compares. Long: minutes per suite. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json

import torch

from outrider import LLM
from outrider.bench.runner import RunConfig, Runner
from outrider.bench.session import Bench, encode_suites
from outrider.bench.settings import BASELINE, Setting, runnable
from outrider.bench.stats import ratio_of
from outrider.bench.suites import load_suites
from outrider.bench.tune import TuneConfig, tune
from outrider.bundled import bundled_path
from outrider.core.draft import Shape
from outrider.methods import METHODS


def every_setting(methods: list[str], lengths: list[int]) -> list[Setting]:
    """The grid of the exhaustive search."""
    found = [Setting(BASELINE)]
    for name in methods:
        sizes: list[int | None] = [None] if METHODS[name].drafter.shape is Shape.CHAIN else [8, 16, 32]
        for length in lengths:
            for size in sizes:
                options = {"num_draft_tokens": length, **({"num_tree_nodes": size} if size else {})}
                found.append(Setting(name, options=options))
        found.append(Setting(name, policy="adaptive", options={"num_draft_tokens": max(lengths)}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="stories,extraction,chat")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,8,10")
    parser.add_argument("--methods", default="", help="of the exhaustive search (default: all lossless ones)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(method="draft-model", draft=bundled_path("draft"))
    lengths = [int(length) for length in arguments.lengths.split(",")]
    chosen = [name for name in arguments.methods.split(",") if name]
    methods = chosen or [name for name in METHODS if name != BASELINE and Setting(name).lossless]
    grid, _ = runnable(llm, every_setting(methods, lengths), lambda _: None)
    rows: list[dict[str, object]] = []
    for suite in arguments.suites.split(","):
        run = RunConfig(num_rounds=arguments.rounds, max_tokens=arguments.tokens)
        bench = Bench(suites=load_suites([suite]), num_prompts=arguments.prompts, run=run)
        prompts = encode_suites(llm, bench)
        many = [prompt for each in prompts.values() for prompt in each]
        config = TuneConfig(methods=methods, max_tokens=arguments.tokens, num_rounds=arguments.rounds)
        best = tune(llm, many, config).best.setting
        settings = grid + ([] if best.label in {setting.label for setting in grid} else [best])
        results = Runner(llm, settings, {suite: many}, config=run).run()
        plain = results.cell(BASELINE, suite, 1).times
        speeds = {one.label: ratio_of(results.cell(one.label, suite, 1).times, plain).value for one in settings}
        winner = max(speeds, key=lambda label: speeds[label])
        share = speeds[best.label] / speeds[winner]
        print(
            f"{suite:<14}tuned {best.label} {speeds[best.label]:.2f}x, best {winner} {speeds[winner]:.2f}x: {share:.1%}",
            flush=True,
        )
        rows.append({"suite": suite, "tuned": best.label, "best": winner, "share": share, "settings": len(settings)})
    print(json.dumps({"rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
