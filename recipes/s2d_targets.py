"""One sorted draft for two targets of one vocabulary: each of its exits alone, and the exit chosen by confidence.

The targets are the bundled one, and the same cut to half of its layers and distilled a little: another model with other texts.
The draft is the bundled one with three more layers, after sorted training on texts of the first target. The new layers change
nothing before they have learned, since their last matrices are zero. The bundled draft as ``draft-model`` is the plain
alternative.

    python recipes/smaller_drafts.py drafts                 # writes the texts, among other things
    python recipes/s2d_targets.py make                      # some five minutes of a CPU core
    python recipes/s2d_targets.py judge --json benchmarks/results/s2d_targets.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from in_turns import Timed, race
from s2d import NUM_PROMPT_TOKENS, STORIES, ways
from torch import nn

from outrider.api import LLM
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.cli.main import main as outrider
from outrider.models.native import ready_to_measure
from outrider.train.draft_lm import DraftLM

EXITS = (1, 2, 4)
LEARNING = "--max-len 96 --held-out 16 -O batch_size=8".split()


def grown(folder: str, num_layers: int, out: Path) -> None:
    """Write a draft with more layers, the new ones on top. What it says is the same."""
    old = DraftLM.load(folder, torch.device("cpu"))
    new = DraftLM.fresh(folder, {"num_hidden_layers": num_layers}, torch.device("cpu"))
    new.load_state_dict({**new.state_dict(), **old.state_dict()})
    for layer in list(new.model.layers)[old.config.num_layers :]:
        for name, parameter in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
    new.save(out, {"from": Path(folder).name, "layers": num_layers})


def make(out: Path, corpus: Path, *, seconds: float) -> None:
    """The second target and the draft."""
    data, small, draft = ["--data", str(corpus)], str(out / "pruned"), str(out / "grown")
    bound = ["-O", f"max_seconds={seconds}"]
    outrider(["prune", *data, "--layers", "8", "--max-len", "96", "--out", small])
    teach = "-O max_steps=60 -O judge_every=15 -O save_every=15 -O learning_rate=0.001 -O warmup_steps=5".split()
    outrider(["train", "distill", "--draft", small, *data, "--out", str(out), *LEARNING, *teach, *bound])
    grown(bundled_path("draft"), EXITS[-1], Path(draft))
    teach = "-O max_steps=120 -O judge_every=20 -O save_every=20 -O learning_rate=0.0005 -O warmup_steps=8".split()
    teach += ["-O", f"exits={','.join(map(str, EXITS))}", "-O", "loss=mixed"]
    outrider(["train", "sorted", "--draft", draft, *data, "--out", str(out / "run"), *LEARNING, *teach, *bound])


def rows_of(name: str, target: str, draft: Path, *, count: int, num_tokens: int) -> list[dict[str, Any]]:
    """One target with all ways of using the draft."""
    llm = LLM(target, draft=str(draft), method="s2d", exits=EXITS)
    whole = LLM(target, draft=bundled_path("draft"), method="draft-model")
    others = {"the bundled draft, draft-model": Timed(whole, whole.compose("draft-model", policy="fixed", num_draft_tokens=4))}
    others |= {
        way: Timed(llm, llm.compose("s2d", policy="fixed", num_draft_tokens=4, **options))
        for way, options in ways(EXITS).items()
    }
    stories = STORIES.read_text(encoding="utf-8").splitlines()[:count]
    prompts = [llm.codec.encode(json.loads(line)["text"])[:NUM_PROMPT_TOKENS] for line in stories]
    plain = Timed(llm, llm.compose("plain"))
    race(plain, others, prompts, num_tokens)
    return [{"target": name, "draft": "none", "tokens per pass": 1.0, "tokens per CPU s": plain.speed, "to plain": 1.0}] + [
        {"target": name, "draft": way, **figures(timed), "to plain": round(timed.speed / plain.speed, 2)}
        for way, timed in others.items()
    ]


def figures(timed: Timed) -> dict[str, Any]:
    drafter = vars(timed.method.drafter)
    counts = drafter.get("num_guesses")
    depth = 1.0 if counts is None else sum(n * layer for n, layer in zip(counts, drafter["exits"], strict=True)) / sum(counts)
    found = {"tokens per pass": timed.tokens_per_pass, "layers per guess": round(depth, 2), "draft, ms": timed.draft_ms}
    return {**found, "tokens per CPU s": timed.speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=("make", "judge"))
    parser.add_argument("--out", type=Path, default=Path("build/s2d"))
    parser.add_argument("--corpus", type=Path, default=Path("build/smaller/corpus.jsonl"))
    parser.add_argument("--seconds", type=float, default=900.0, help="of each training, at most")
    parser.add_argument("--count", type=int, default=8, help="held-out stories, of which the first tokens are given")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.stage == "make":
        make(arguments.out, arguments.corpus, seconds=arguments.seconds)
        return
    torch.set_num_threads(1)
    ready_to_measure()
    draft, rows = arguments.out / "run" / "sorted", list[dict[str, Any]]()
    for name, target in (
        ("bundled, 16 layers", bundled_path("target")),
        ("its half, 8 layers", str(arguments.out / "distill")),
    ):
        rows += rows_of(name, target, draft, count=arguments.count, num_tokens=arguments.tokens)
    print(*map(json.dumps, rows), sep="\n")
    what = "one sorted draft for two targets: each exit alone and the exit chosen by confidence, chains of four, one CPU thread"
    keep_results(arguments.json, what, rows, script="recipes/s2d_targets.py")


if __name__ == "__main__":
    main()
