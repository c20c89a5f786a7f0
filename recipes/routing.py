"""Step-level routing with trained models: right answers against escalations, what routers predict, and what it costs (LOSSY).

A draft of 0.35 million numbers and a target of 3.0 million write chains of ten steps (``routing_task.py``). Two rewards judge
the steps: an exact checker, which is easier than the papers' setting, and a third model, which errs. Its reward is how likely
it would write the step. Every router's thresholds are chosen on the questions that Arbitrage's router learns from. *Wasted* is
the share of the steps with the highest scores that the target does not improve. Texts are greedy. Time is that of the
processor, one text after the other. Models that are in the folder are not trained again.

    python recipes/routing.py [--out build/routing] [--questions 60] [--learn 160] [--timed 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import routing_task as task
import torch

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.core.params import SamplingParams
from outrider.routing.advantage import Advantage, Comparisons, compare, learn_advantage, spearman
from outrider.routing.language_models import LikelihoodReward, ModelWriter, StateFeatures
from outrider.routing.routers import Coin, Oracle, RewardThreshold
from outrider.routing.steps import Reward, Router, StepWriter, WrittenStep, route, share_escalated

WHAT = {
    "rows": "step-level routers between trained models on chains of ten steps, greedy: right answers by escalations",
    "predicted": "what scores of a draft's steps say of the gain by the target's, on steps that no router learned from",
    "time": "processor time of a text by each way of writing it, one text after the other, other programs beside",
}
"""The tables, each in a file of its own: FILE, FILE_predicted and FILE_time."""
SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of the steps that a router is to escalate, as far as its scores allow."""


@final
class Checker(Reward):
    """The exact reward."""

    def score(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        return [task.checked(text, step) for text, step in zip(texts, steps, strict=True)]


@final
class Remembered(StepWriter):
    """A greedy writer that writes behind each text once: routers are compared on the same steps."""

    def __init__(self, writer: StepWriter) -> None:
        self.writer, self.known = writer, dict[str, WrittenStep]()

    def write(self, texts: Sequence[str], seeds: Sequence[int]) -> list[WrittenStep]:
        new = [place for place, text in enumerate(texts) if text not in self.known]
        if new:
            found = self.writer.write([texts[i] for i in new], [seeds[i] for i in new])
            self.known.update(zip((texts[i] for i in new), found, strict=True))
        return [self.known[text] for text in texts]


@dataclass(frozen=True, eq=False)
class Cast:
    """The models, opened."""

    draft: LLM
    target: LLM
    reward: LLM

    @staticmethod
    def of(folder: Path) -> Cast:
        names = {name: str(folder / name) for name in task.SIZES}
        target = LLM(names["target"], draft=names["draft"], method="draft-model")
        return Cast(LLM(names["draft"], method="plain"), target, LLM(names["reward"], method="plain"))

    def writers(self) -> tuple[ModelWriter, ModelWriter]:
        return (
            ModelWriter(self.draft, end="\n", max_tokens=8),
            ModelWriter(self.target, end="\n", max_tokens=8, method="plain"),
        )


def trained(folder: Path) -> dict[str, Any]:
    """Train the models that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for kind in task.SIZES:
        notes = folder / kind / "training.json"
        if not notes.is_file():
            notes_of = task.train(folder, kind)
            notes.write_text(json.dumps(notes_of))
        found[kind] = json.loads(notes.read_text())
    return found


def thresholds(reward: Reward, seen: Comparisons) -> list[Router]:
    """RSD at thresholds that escalate the given shares of the steps that were learnt from; the highest would escalate all."""
    scores = torch.tensor(seen.scores)
    limits = {float(scores.quantile(share)) for share in SHARES} - {float(scores.max())}
    return [RewardThreshold(reward, limit) for limit in sorted(limits)]


def chances(learnt: Advantage, seen: Comparisons) -> list[Router]:
    """Arbitrage at such thresholds."""
    known = torch.tensor(learnt.chances(seen.seen))
    return [learnt.at(float(known.quantile(1 - share))) for share in SHARES]


def row_of(
    name: str, router: Router, questions: Sequence[str], writers: tuple[StepWriter, StepWriter], own: Sequence[str]
) -> dict[str, Any]:
    """One router at one threshold. ``own`` are the target's texts."""
    texts = route(questions, *writers, router, num_steps=task.NUM_STEPS)
    count = len(texts)
    return {
        "router": name,
        "escalated": round(share_escalated(texts), 3),
        "right answers": round(sum(task.is_right(one.prompt, one.text) for one in texts) / count, 3),
        "the target's text": round(sum(one.text == text for one, text in zip(texts, own, strict=True)) / count, 3),
    }


def predictions(scores: Sequence[float], gains: Sequence[float]) -> dict[str, float]:
    """How well scores order steps by what the target gains, and how much of the highest ones brings nothing."""
    gain, ranking = torch.tensor(gains), torch.tensor(scores).argsort(descending=True)
    wasted = {
        f"wasted of {share:.0%}": round(float((gain[ranking[: max(1, round(share * len(gain)))]] <= 0).float().mean()), 3)
        for share in SHARES
    }
    return {"Spearman": round(spearman(scores, gains), 3), **wasted}


def timed(cast: Cast, questions: Sequence[str], routers: dict[str, Router]) -> list[dict[str, Any]]:
    """Processor time of a text, in milliseconds, one text after the other, every way once for each text."""
    params = SamplingParams(max_tokens=2 * task.NUM_STEPS)

    def routed(router: Router) -> Callable[[str], str]:
        return lambda question: route([question], *cast.writers(), router, num_steps=task.NUM_STEPS)[0].text

    def alone(llm: LLM, method: str) -> Callable[[str], str]:
        return lambda question: llm.generate([question], params, method=method)[0].text

    ways = {
        "target alone, plain": alone(cast.target, "plain"),
        "target, method draft-model (exact)": alone(cast.target, "draft-model"),
        "draft alone, plain": alone(cast.draft, "plain"),
        **{name: routed(router) for name, router in routers.items()},
    }
    spent, right = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for write in ways.values():
        write(questions[0])  # compiles and allocates
    for question in questions:
        for name, write in ways.items():
            began = time.process_time()
            text = write(question)
            spent[name] += time.process_time() - began
            right[name] += task.is_right(question, text)
    count = len(questions)
    return [
        {"way": name, "ms of processor time": round(1000 * spent[name] / count, 1), "right answers": right[name] / count}
        for name in ways
    ]


def study(cast: Cast, *, num_questions: int, num_learn: int, num_timed: int) -> dict[str, Any]:
    """All rows."""
    draft, target = map(Remembered, cast.writers())
    writers = (draft, target)
    asked = task.questions("asked", num_questions)
    own = [one.text for one in route(asked, *writers, Coin(1.0), num_steps=task.NUM_STEPS)]
    rows = [{"reward": "", **row_of("random", Coin(rate), asked, writers, own)} for rate in (0.0, *SHARES, 1.0)]
    predicted, quick = list[dict[str, Any]](), dict[str, Router]()
    for name, reward in (("exact", Checker()), ("learnt", LikelihoodReward(cast.reward))):
        rows += [{"reward": name, **row_of("oracle", Oracle(reward), asked, writers, own)}]
        for kind, llm in (("Arbitrage, sees the draft", cast.draft), ("Arbitrage, sees the reward model", cast.reward)):
            features = StateFeatures(llm)
            seen, held = (
                compare(part, *writers, reward, features, num_steps=task.NUM_STEPS)
                for part in (task.questions("learn", num_learn), asked)
            )
            learnt = learn_advantage(seen, features)
            found = {kind: chances(learnt, seen), **({"RSD": thresholds(reward, seen)} if llm is cast.draft else {})}
            rows += [{"reward": name, **row_of(who, one, asked, writers, own)} for who, many in found.items() for one in many]
            predicted += [{"reward": name, "router": kind, **predictions(learnt.chances(held.seen), held.gains)}]
            if "RSD" in found:
                predicted += [{"reward": name, "router": "RSD", **predictions([-score for score in held.scores], held.gains)}]
            quick |= {who: many[1] for who, many in found.items() if name == "learnt"}
    return {"predicted": predicted, "time": timed(cast, task.questions("timed", num_timed), quick), "rows": rows}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/routing"))
    parser.add_argument("--questions", type=int, default=60, help="questions that routers are compared on")
    parser.add_argument("--learn", type=int, default=160, help="questions that a router learns from")
    parser.add_argument("--timed", type=int, default=10, help="questions whose time is taken")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    training = trained(chosen.out)
    found = study(Cast.of(chosen.out), num_questions=chosen.questions, num_learn=chosen.learn, num_timed=chosen.timed)
    for row in (*found["rows"], *found["predicted"], *found["time"]):
        print(json.dumps(row))
    head = results_head(WHAT["rows"], script="recipes/routing.py")
    document = {**head, "models": training, **found}
    if chosen.json:
        for part, what in WHAT.items():
            name = chosen.json.stem + ("" if part == "rows" else f"_{part}")
            rows = {**head, "what": what, "models": training, "rows": found[part]}
            chosen.json.with_stem(name).write_text(json.dumps(rows, indent=1) + "\n")
    return document


if __name__ == "__main__":
    main()
