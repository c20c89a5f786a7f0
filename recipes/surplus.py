"""Is the order of heads that ``outrider analyse`` predicts the order that training finds?

Three heads of one shape differ in what they see. Medusa sees the target's state alone. Hydra without its prefix layer sees the
state and the tokens after it. The same Hydra with zeros for states sees those tokens alone. They learn in one process, from the
same batches of texts that the bundled target wrote, for the same number of steps. What is compared is the length that a chain
of guesses keeps on held-out texts, which is what the probes predict.

    outrider analyse --out build/analyse.json
    python recipes/surplus.py --predicted build/analyse.json [--steps 300] [--texts 1500] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.bench.session import Bench, encode_suites
from outrider.bench.suites import load_suites
from outrider.bench.surplus.texts import own_texts
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.models.heads import PackedTexts
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config, new_head, signature_of
from outrider.train.data import Corpus, Document
from outrider.train.loop import train
from outrider.train.objective import BatchOutcome, HeadObjective, HeadSettings, Objective
from outrider.train.run import Run, Settings

NUM_DEPTHS = 3
HEADS = {"state": "medusa", "state + tokens": "hydra", "tokens": "hydra, states zeroed"}
"""By the names of the probes' inputs."""


@final
class WithoutStates(Objective):
    """Heads that read the tokens alone: every state of the target is zero."""

    def __init__(self, inner: HeadObjective) -> None:
        self.inner, self.name = inner, f"{inner.name}-without-states"
        self.module, self.taps = inner.module, inner.taps

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        return self.inner(replace(batch, features=torch.zeros_like(batch.features)))

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.inner.save(folder, {**notes, "states": "zero"})


def objectives_of(target: Target) -> dict[str, Objective]:
    """Untrained heads by what they see."""
    raw, ends = read_target(bundled_path("target"))

    def made(kind: str) -> HeadObjective:
        torch.manual_seed(0)
        config = new_config(kind, raw, num_heads=NUM_DEPTHS, num_blocks=2, own_readouts=False)
        head = new_head(replace(config, signature=signature_of(target, config.hidden_size)), ends)
        return HeadObjective(head, target, HeadSettings(num_depths=NUM_DEPTHS, loss="mixed"), recompute=False)

    return {"state": made("medusa"), "state + tokens": made("hydra"), "tokens": WithoutStates(made("hydra"))}


def documents_of(llm: LLM, num_texts: int) -> list[Document]:
    """Texts that the target wrote at temperature 1 behind the beginnings that ``outrider analyse`` uses."""
    bench = Bench(suites=load_suites(["stories", "chat"]), num_prompts=None)
    prompts = [prompt[-64:] for many in encode_suites(llm, bench).values() for prompt in many]
    return [Document(tuple(text)) for text in own_texts(llm, prompts, num_texts=num_texts, num_tokens=96, temperature=1.0)]


def row_of(seen: str, run: Run, predicted: dict[str, Any]) -> dict[str, Any]:
    """A head at its last step, beside the probe with the same input."""
    last = run.history[-1]
    trained = sum(p.numel() for p in run.objective.module.parameters() if p.requires_grad)
    return {
        "sees": seen,
        "head": HEADS[seen],
        "trained numbers, millions": round(trained / 1e6, 2),
        "steps": last["step"],
        "acceptance by position": last["by_depth"],
        "kept in a chain": round(last["accepted_length"] - 1, 3),
        "predicted by the probe": round(predicted["accepted"][seen], 3),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/surplus"), help="folder of the heads")
    parser.add_argument("--predicted", type=Path, required=True, help="file of `outrider analyse --out`")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=3, help="texts per step")
    parser.add_argument("--seconds", type=float, help="all heads stop then, at the same step")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    predicted = json.loads(chosen.predicted.read_text())
    llm = LLM(bundled_path("target"), method="plain")
    documents = documents_of(llm, chosen.texts)
    corpus = Corpus.of(documents, held_out=max(1, min(128, chosen.texts // 5)))
    objectives = objectives_of(llm.target)
    settings = Settings(
        max_steps=chosen.steps, max_seconds=chosen.seconds, batch_size=chosen.batch, row_len=160, learning_rate=2e-3,
        warmup_steps=min(30, chosen.steps), judge_every=max(1, chosen.steps // 6), save_every=100_000, patience=1000, seed=1,
    )  # fmt: skip
    runs = train(list(objectives.values()), llm.target, corpus, chosen.out, settings=settings, progress=True)
    rows = [row_of(seen, run, predicted) for seen, run in zip(objectives, runs, strict=True)]
    measured = [row["sees"] for row in sorted(rows, key=lambda row: -row["kept in a chain"])]
    for row in rows:
        print(json.dumps(row))
    print(f"predicted order: {' > '.join(predicted['order'])}\nmeasured order:  {' > '.join(measured)}")
    head = results_head(
        "what heads keep in a chain of three, and what probes of the same input promised", script="recipes/surplus.py"
    )
    tokens = int(np.sum([len(document.tokens) for document in documents]))
    orders = {"predicted order": " > ".join(predicted["order"]), "measured order": " > ".join(measured)}
    histories = {seen: run.history for seen, run in zip(objectives, runs, strict=True)}
    found = {**head, "text_tokens": tokens, **orders, "histories": histories, "rows": rows}
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
