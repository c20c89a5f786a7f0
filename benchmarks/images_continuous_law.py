"""The law of single continuous tokens by rule: 20,000 tokens of each rule at fixed conditions, beside as many of the target's.

Whole images of a hundred cannot tell a lossy rule from an exact one. Here the prefix is fixed: the target wrote it, and target
and draft read it once. Each rule then judges the same drafted tokens. Its tokens are compared with a target run by KS, in each
number of the token and in their sum, at several places of images. Two more target runs give the noise floor, and the draft's
own tokens what is lost where everything is kept. Once in a thousand times two samples of one law differ by more than
``limit`` in one comparison. The last line of the output is JSON.

    python benchmarks/images_continuous_law.py --model build/images/continuous [--tokens 20000] [--steps 25]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from continuous_ways import RULES, ks, pair
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.images.continuous.decode import ContinuousSettings, PathWriter
from outrider.images.continuous.interfaces import ContinuousTarget
from outrider.images.continuous.paths import Chain, denoised, fresh_noise
from outrider.images.continuous.rules import PathRule, Published

PLACES = ((2, 3), (5, 6), (9, 9), (7, 12))
"""A class and the place of a token in an image of it."""
ALL: dict[str, PathRule] = {
    **RULES,
    "published, temperature 10": Published(temperature=10.0),
    "published, temperature 1": Published(temperature=1.0),
}


@final
class Repeated(Chain):
    """A chain of one token, for as many tokens of this condition as there are points."""

    def __init__(self, one: Chain, num_rows: int) -> None:
        self.one, self.num_rows = one, num_rows
        self.schedule, self.dim, self.dtype = one.schedule, one.dim, one.dtype

    def mean(self, x: Tensor, t: int) -> Tensor:
        return self.one.mean(x, t)

    def select(self, rows: Tensor) -> Repeated:
        return Repeated(self.one, len(rows))


def chains(target: ContinuousTarget, draft: ContinuousTarget, place: tuple[int, int], count: int) -> tuple[Repeated, Repeated]:
    """Both models' denoisers of a token behind the same prefix, which the target wrote."""
    label = torch.tensor([place[0] % target.num_classes])
    prefix = PathWriter(target, settings=ContinuousSettings()).write(label, torch.Generator().manual_seed(17)).tokens
    prefix = prefix[:, : place[1] % target.num_tokens]
    p, q = (Repeated(model.chain(model.conditions(prefix, label)[:, -1]), count) for model in (target, draft))
    return p, q


def distances(tokens: Tensor, run: Tensor) -> list[float]:
    """KS in every number and in their sum."""
    return [*ks(tokens, run), *ks(tokens.sum(1, keepdim=True), run.sum(1, keepdim=True))]


@torch.no_grad()
def at_place(p: Chain, q: Chain) -> dict[str, dict[str, Any]]:
    """What each rule keeps at one place and how far its tokens are from a target run; the floor and the draft are rows too."""
    chance = torch.Generator().manual_seed(5)
    runs = [denoised(p, fresh_noise(p, chance)).tokens for _ in range(3)]
    noise = fresh_noise(q, chance)
    drafted = denoised(q, noise)
    found = {
        "two target runs": {"kept": 0.0, "ks": distances(runs[1], runs[0]) + distances(runs[2], runs[0])},
        "draft alone": {"kept": 1.0, "ks": distances(drafted.tokens, runs[0])},
    }
    for name, rule in ALL.items():
        judged = rule.judge(drafted, noise, p=p, q=q, chance=chance)
        found[name] = {"kept": float(judged.kept.float().mean()), "ks": distances(judged.tokens, runs[0])}
    return found


def measured(folder: Path, num_steps: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """A row per rule over the places so far, after each place."""
    target, draft = pair(folder, num_steps)
    found = list[dict[str, dict[str, Any]]]()
    for place in PLACES:
        found.append(at_place(*chains(target, draft, place, count)))
        yield [_row(name, [one[name] for one in found], num_steps, count) for name in found[0]]


def _row(name: str, found: list[dict[str, Any]], num_steps: int, count: int) -> dict[str, Any]:
    distance = [value for one in found for value in one["ks"]]
    lossless = ALL[name].lossless if name in ALL else name != "draft alone"
    return {
        "rule": name,
        "lossless": lossless or name == "published, temperature 1",
        "steps": num_steps,
        "places": len(found),
        "kept": round(sum(one["kept"] for one in found) / len(found), 4),
        "ks_mean": round(sum(distance) / len(distance), 4),
        "ks_max": round(max(distance), 4),
        "limit": round(math.sqrt(-math.log(0.0005) / count), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of each rule at each place")
    parser.add_argument("--steps", default="25")
    parser.add_argument("--note", default="", help="what else the results should say of the models")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows, document = list[dict[str, Any]](), dict[str, Any]()
    what = f"the law of continuous tokens by rule, {arguments.tokens} tokens of each rule at each place{arguments.note}"
    for num_steps in map(int, arguments.steps.split(",")):
        done = rows
        for found in measured(arguments.model, num_steps, arguments.tokens):
            rows = [*done, *found]  # written after every place: a run that is stopped leaves what it has
            document = keep_results(arguments.out, what, rows, script="benchmarks/images_continuous_law.py")
    print("\n".join(map(str, rows)))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
