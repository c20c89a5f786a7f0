"""Trained drafters for the model of ``grid_captions.py``: what they accept at equal steps, with more and more blank pictures.

python recipes/grid_captions.py --out build/grid --most-images 8 --steps 4000      # the target, once
python recipes/grid_drafters.py --grid build/grid --out build/grid-drafters         # heads, then figures

All drafts learn from the same batches, by the same loss, for the same steps. There is a text-only one, one with all visual
columns (SpecVLM with one expert each), EAGLE-1, and MSD without and with its curriculum. Further ones are ViSpec with one and
four columns per prompt, and SpecVLM with its gate. Pictures that follow each other are one run of columns. The target is run
while they learn: nothing is stored. Texts are compared with plain decoding, greedy and sampled, in one ragged batch. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from grid_captions import QUESTIONS, Sample, any_sample, ids_of, is_right, prompt_of, sample_of

from outrider import LLM, SamplingParams
from outrider.bench.provenance import results_head
from outrider.core.request import Origin
from outrider.models.heads import new_head
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.folder import load_head, new_config, signature_of
from outrider.models.heads.specvlm import SpecvlmHead
from outrider.train.data import Corpus, Document
from outrider.train.features import DocumentRows, compute
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings
from outrider.train.run import Run
from outrider.vision.embedding_and_output import read_vision_target
from outrider.vision.prompts import Vision

NUM_BINS = 6
"""Parts of an answer in which acceptance is counted."""
WHAT = (
    "drafters of the grid-caption test-bed: tokens per pass, share of texts identical with plain decoding, accepted share by "
    "part of the output; learning: accepted length on held-out captions by step; experts: share of pictures by expert"
)
CHAIN = {"num_draft_tokens": 4, "branching": "chain"}
TREE = {"num_draft_tokens": 5, "num_tree_nodes": 16}


@dataclass(frozen=True)
class Variant:
    """One draft."""

    kind: str
    shape: dict[str, Any] = field(default_factory=dict)
    has_curriculum: bool = False


VARIANTS: dict[str, Variant] = {
    "text-only": Variant("specvlm", {"visual_experts": "none"}),
    "full-visual": Variant("specvlm", {"visual_experts": "full"}),
    "eagle1": Variant("eagle1"),
    "msd-mixed": Variant("msd"),
    "msd": Variant("msd", has_curriculum=True),
    "vispec": Variant("vispec"),
    "vispec-4": Variant("vispec", {"num_visual_queries": 5}),
    "specvlm": Variant("specvlm"),
}


def corpus_of(vision: Vision, num_texts: int, most_images: int) -> Corpus:
    """Documents of all sorts; those to judge by are captions with pictures."""
    chance = random.Random(10)
    texts = [document_of(vision, any_sample(chance, most_images)) for _ in range(num_texts)]
    return Corpus(texts, [document_of(vision, sample_of(chance, 1)) for _ in range(64)])


def document_of(vision: Vision, sample: Sample) -> Document:
    prompt, answer = prompt_of(sample), ids_of(sample.answer)
    if not sample.pictures:
        return Document((*prompt["prompt"], *answer), len(prompt["prompt"]))
    document = Document.with_images(vision, prompt["prompt"], prompt["images"], answer)
    assert document.seen is not None
    seen = document.seen()  # kept: pictures are small, and read in every epoch
    return replace(document, seen=lambda: seen)


def objective_of(name: str, llm: LLM, known: tuple[dict[str, Any], EmbeddingAndOutput], steps: int) -> HeadObjective:
    """``known`` is the target's config and its ends."""
    variant, (raw, ends) = VARIANTS[name], known
    config = new_config(variant.kind, raw, **variant.shape)
    config = replace(config, signature=signature_of(llm.target, config.hidden_size))
    settings = HeadSettings(num_depths=4, loss="mixed", curriculum_steps=steps if variant.has_curriculum else 0)
    objective = HeadObjective(new_head(config, ends).to(llm.target.device), llm.target, settings, recompute=False)
    objective.name = name
    return objective


def train_all(target: Path, llm: LLM, arguments: argparse.Namespace) -> dict[str, Run]:
    """Those without a curriculum in one loop; then the one with it alone, on the same documents and for as many steps."""
    assert llm.reading.vision is not None
    corpus = corpus_of(llm.reading.vision, arguments.texts, arguments.most_images)
    known, steps, seconds, runs = read_vision_target(target), arguments.steps, arguments.seconds, dict[str, Run]()
    for folder, has_curriculum in (("together", False), ("curriculum", True)):
        chosen = [name for name in arguments.only if VARIANTS[name].has_curriculum is has_curriculum]
        objectives = [objective_of(name, llm, known, steps) for name in chosen]
        pace: dict[str, Any] = {"learning_rate": 2e-3, "warmup_steps": 30, "patience": 100, "max_seconds": seconds}
        sizes: dict[str, Any] = {"max_steps": steps, "batch_size": arguments.batch, "row_len": 256}
        settings = Settings(**sizes, **pace, judge_every=max(1, steps // 12), save_every=steps)
        if objectives:
            done = train(objectives, llm.target, corpus, arguments.out / folder, settings=settings)
            runs |= {run.objective.name: run for run in done}
            steps, seconds = done[0].history[-1]["step"], None
    return runs


def measure(
    llm: LLM, folders: dict[str, Path], samples: Sequence[Sample], shape: dict[str, Any], **params: Any
) -> dict[str, Any]:
    """Tokens per pass and acceptance by output position of every draft, on one batch of prompts."""
    prompts = [prompt_of(sample) for sample in samples]
    asked = SamplingParams(max_tokens=80, **params)
    plain = [list(one.token_ids) for one in llm.generate(prompts, asked, method="plain")]
    found: dict[str, Any] = {"right": mean([is_right(said, sample) for said, sample in zip(plain, samples, strict=True)])}
    for name, folder in folders.items():
        method = llm.compose(VARIANTS[name].kind, heads=str(folder), **shape)
        outputs = llm.generate(prompts, asked, method=method)
        same = [list(one.token_ids) == text for one, text in zip(outputs, plain, strict=True)]
        tokens, passes = (sum(vars(one.stats)[key] for one in outputs) for key in ("num_tokens", "num_passes"))
        by_place = by_position([one.origins for one in outputs])
        found[name] = {"tokens_per_pass": round(tokens / passes, 3), "identical": mean(same), "by_position": by_place}
    return found


def by_position(origins: Sequence[Sequence[Origin]]) -> list[float]:
    """Share of accepted tokens in equal parts of the answers, the first part first."""
    parts: list[list[bool]] = [[] for _ in range(NUM_BINS)]
    for row in origins:
        for place, origin in enumerate(row):
            parts[NUM_BINS * place // len(row)].append(origin is Origin.ACCEPTED)
    return [mean(part) for part in parts]


def mean(flags: Sequence[bool]) -> float:
    return round(sum(flags) / max(1, len(flags)), 4)


def figures(llm: LLM, folders: dict[str, Path], num_scenes: int, most_images: int) -> Iterator[dict[str, Any]]:
    """Rows of the results file."""
    sizes = [size for size in (1, 2, 4, 8) if size <= most_images]
    samples = {size: [sample_of(random.Random(1000 + i), size) for i in range(num_scenes)] for size in sizes}
    counts = [sample_of(random.Random(2000 + i), 1, "count") for i in range(num_scenes)]
    ragged = [sample_of(random.Random(3000 + i), (0, *sizes)[i % (len(sizes) + 1)]) for i in range(num_scenes)]
    asked: list[tuple[str, Sequence[Sample], dict[str, Any], dict[str, Any]]] = [
        ("ragged batch", ragged, CHAIN, {"temperature": 0}),
        *((f"describe, {size} pictures", samples[size], CHAIN, {"temperature": 0}) for size in sizes),
        ("describe, tree", samples[1], TREE, {"temperature": 0}),
        ("describe, temperature 1", samples[1], CHAIN, {"temperature": 1.0, "seed": 5}),
        ("count", counts, CHAIN, {"temperature": 0}),
    ]
    for name, some, shape, params in asked:
        yield {"prompts": name, "scenes": len(some), **measure(llm, folders, some, shape, **params)}


def experts_of(head: SpecvlmHead, llm: LLM, num_scenes: int) -> dict[str, dict[str, float]]:
    """Which expert the gate picks, by question."""
    assert llm.reading.vision is not None
    found: dict[str, dict[str, float]] = {}
    for question in QUESTIONS:
        samples = [sample_of(random.Random(4000 + i), 1, question) for i in range(num_scenes)]
        documents = [document_of(llm.reading.vision, sample) for sample in samples]
        states = compute(llm.target, documents, head.config.taps)
        batch = DocumentRows(states, documents, row_len=256, last=llm.target.num_layers).packed(head.config.taps)
        with torch.no_grad():
            chosen = head.chosen(head.columns_of(batch)).tolist()
        found[question] = {name: mean([one == number for one in chosen]) for number, name in enumerate(head.experts)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True, help="--out of grid_captions.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, help="ends the drafts' training earlier, all after the same steps")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--most-images", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    target = arguments.grid / "target"
    llm = LLM(str(target), method="plain", dtype="float32", device=arguments.device, fast=False)
    began = time.monotonic()
    runs = train_all(target, llm, arguments)
    seconds = time.monotonic() - began
    folders = {name: runs[name].folder for name in arguments.only}
    trained = next(iter(runs.values())).history[-1]["step"]
    found = {**facts_of(arguments), "steps": trained, "training_seconds": round(seconds), "rows": []}
    found["learning"] = {name: [[one["step"], one["accepted_length"]] for one in run.history] for name, run in runs.items()}
    if "specvlm" in folders:
        head = load_head(folders["specvlm"], llm.target)
        assert isinstance(head, SpecvlmHead)
        found["experts"] = experts_of(head, llm, arguments.scenes)
    for row in figures(llm, folders, arguments.scenes, arguments.most_images):
        found["rows"].append(row)
        print(json.dumps(row), f"after {time.monotonic() - began:.0f} s", flush=True)
        if arguments.results is not None:  # after every row: a run that is stopped leaves what it has
            arguments.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where the figures come from."""
    named = {name: vars(arguments)[name] for name in ("batch", "texts")}
    return results_head(WHAT, script="recipes/grid_drafters.py") | named


if __name__ == "__main__":
    main()
