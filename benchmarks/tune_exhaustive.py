"""Is `outrider tune` within 5 % of the best setting that an exhaustive search finds?

    python benchmarks/tune_exhaustive.py [--suites stories,extraction,chat] [--state build/tune.json] [--seconds 200]

For each suite it tunes. Then it measures every lossless method at every length (trees at several sizes) and under the adaptive
policy, once, in groups beside plain decoding. Next come all that came within ``--margin`` of the fastest, and what `tune`
chose, in turns and several rounds. Then it measures the best few of these in four times as many rounds, and compares. What is
done is kept in ``--state``: with ``--seconds`` a call stops after about so long, and the next one goes on. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider import LLM
from outrider.bench.runner import RunConfig, Runner
from outrider.bench.session import Bench, encode_suites
from outrider.bench.settings import BASELINE, Setting, runnable
from outrider.bench.stats import Estimate, ratio_of
from outrider.bench.suites import load_suites
from outrider.bench.tune import tune
from outrider.bench.tune_config import TuneConfig
from outrider.bundled import bundled_path
from outrider.core.draft import Shape
from outrider.methods import METHODS

_GROUP = 24
"""Settings of the search that are measured between two looks at the clock."""
_FIRST_LOOK = 24
"""Tokens of a text in the search over everything."""
_BEST = 5
"""Settings that are measured longest."""
_TREE_SIZES = (8, 16)


def every_setting(methods: Iterable[str], lengths: list[int]) -> list[Setting]:
    """The grid of the exhaustive search."""
    found: list[Setting] = []
    for name in methods:
        sizes: list[int | None] = [None] if METHODS[name].drafter.shape is Shape.CHAIN else list(_TREE_SIZES)
        for length in lengths:
            for size in sizes:
                found.append(Setting(name, options={"num_draft_tokens": length, **({"num_tree_nodes": size} if size else {})}))
        found.append(Setting(name))  # as `generate` runs it: adaptive
    return found


class Search:
    """One suite's search, as far as it has come."""

    def __init__(self, llm: LLM, suite: str, arguments: argparse.Namespace, state: dict[str, Any]) -> None:
        self.llm, self.suite, self.arguments, self.state = llm, suite, arguments, state
        run = RunConfig(max_tokens=arguments.tokens)
        bench = Bench(suites=load_suites([suite]), num_prompts=arguments.prompts, run=run)
        self.prompts = [prompt for many in encode_suites(llm, bench).values() for prompt in many]
        chosen = [name for name in arguments.methods.split(",") if name]
        self.methods = chosen or [name for name in METHODS if name != BASELINE and Setting(name).lossless]
        lengths = [int(length) for length in arguments.lengths.split(",")]
        self.grid, _ = runnable(llm, every_setting(self.methods, lengths), lambda _: None)

    def step(self) -> bool:
        """Do the next piece; False when there is none."""
        if "tuned" not in self.state:
            self._tune()
        elif left := [one for one in self.grid if one.label not in self.state.setdefault("search", {})][:_GROUP]:
            found = self.speed_ups([Setting(BASELINE), *left], num_rounds=1, tokens=_FIRST_LOOK)
            self.state["search"] |= {label: estimate.value for label, estimate in found.items() if label != BASELINE}
        elif "second" not in self.state:
            fast = max(self.state["search"].values()) * (1 - self.arguments.margin)
            chosen = [one for one in self.grid if self.state["search"][one.label] >= fast]
            self.state["second"] = self._beside_tuned(chosen, num_rounds=self.arguments.rounds)
        elif "final" not in self.state:
            second = {label: estimate["value"] for label, estimate in self.state["second"].items()}
            chosen = sorted((one for one in self.grid if one.label in second), key=lambda one: -second[one.label])[:_BEST]
            self.state["final"] = self._beside_tuned(chosen, num_rounds=4 * self.arguments.rounds)
        else:
            return False
        return True

    def _tune(self) -> None:
        began = time.perf_counter()
        config = TuneConfig(methods=self.methods, max_tokens=self.arguments.tokens)
        tuned = tune(self.llm, self.prompts, config, say=lambda text: print(f"  {text}", flush=True))
        best = tuned.best
        self.state["tuned"] = best.setting.to_json()
        self.state["tune"] = {
            "seconds": time.perf_counter() - began,
            "expected": best.expected,
            "measured": best.speedup.to_json(),
        }

    def _beside_tuned(self, chosen: list[Setting], *, num_rounds: int) -> dict[str, Any]:
        tuned = setting_of(self.state["tuned"])
        others = [one for one in chosen if one.label != tuned.label]
        plain = [Setting(BASELINE)]
        found = self.speed_ups(plain + ([tuned] if tuned.method != BASELINE else []) + others, num_rounds=num_rounds)
        return {label: estimate.to_json() for label, estimate in found.items()}

    def speed_ups(self, settings: list[Setting], *, num_rounds: int, tokens: int | None = None) -> dict[str, Estimate]:
        config = RunConfig(num_rounds=num_rounds, max_tokens=tokens or self.arguments.tokens)
        results = Runner(self.llm, settings, {self.suite: self.prompts}, config=config).run()
        plain = results.cell(BASELINE, self.suite, 1).times
        return {one.label: ratio_of(results.cell(one.label, self.suite, 1).times, plain) for one in settings}


def setting_of(data: Mapping[str, Any]) -> Setting:
    return Setting(data["method"], data["acceptance"], data["policy"], data["options"])


def summary(suite: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """What the search found, beside what tune chose."""
    final, tuned = state["final"], state["tuned"]["label"]
    best = max(final, key=lambda label: final[label]["value"])
    share = final[tuned]["value"] / final[best]["value"]
    seconds, searched = state["tune"]["seconds"], len(state["search"])
    print(
        f"{suite:<14}tuned ({seconds:.0f} s) {tuned} {final[tuned]['value']:.3f}x, best of {searched} settings {best} "
        f"{final[best]['value']:.3f}x ({final[best]['low']:.3f} - {final[best]['high']:.3f}): {share:.1%}"
    )
    return {
        "suite": suite,
        "tuned": tuned,
        "best": best,
        "share": share,
        "settings": searched,
        "second": len(state["second"]) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="stories,extraction,chat")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,8")
    parser.add_argument("--methods", default="", help="of tune and of the search (default: all lossless ones)")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--margin", type=float, default=0.35, help="how far behind the fastest a finalist may be")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, default=Path("build/tune_exhaustive.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.set_num_threads(arguments.threads)
    llm = LLM(method="draft-model", draft=bundled_path("draft"))
    state: dict[str, Any] = json.loads(arguments.state.read_text()) if arguments.state.is_file() else {}
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    for suite in arguments.suites.split(","):
        search = Search(llm, suite, arguments, state.setdefault(suite, {}))
        while time.perf_counter() - began < arguments.seconds and search.step():
            arguments.state.write_text(json.dumps(state))
    done = {suite: part for suite, part in state.items() if "final" in part}
    for suite, part in state.items():
        if suite not in done:
            print(f"{suite}: {len(part.get('search', {}))} settings measured so far; run again to go on")
    print(json.dumps({"rounds": arguments.rounds, "rows": [summary(suite, part) for suite, part in done.items()]}))


if __name__ == "__main__":
    main()
