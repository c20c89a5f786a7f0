"""Drafts for a real checkpoint: stories15M writes stories, and Llamas of one and two layers learn its laws from them.

The bundled pair was made together; this pair was not, so what holds for both is less likely to be an accident of one. The
target writes for a minute and a half, half of it at temperatures near one. Then follows the distillation of the bundled draft,
on fresh text and on continuations, a quarter of them greedy.

    python recipes/stories_draft.py --model ../shared/data/models/stories15M --out build/stories           # GPU, seven minutes
    python recipes/coupled_trees.py --model ../shared/data/models/stories15M --draft build/stories/draft-2
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bundled import full_recipe, load_model, write_json
from bundled_stories import LlamaShape, Sampler, SamplerConfig, StoriesConfig, read_shape, write_stories
from bundled_train import DistillConfig, Llama, distil_drafts, start_draft
from safetensors.torch import save_file

START = 1
"""The mark that opens a story of this model, and the next one."""
WINDOW = 256
"""All that it can read."""


def write_corpus(model: Path, work: Path, seconds: float, *, batch: int) -> None:
    """Stories of all temperatures up to one, as a stream of documents that each begin with their mark."""
    sampler = SamplerConfig(batch=batch, context=WINDOW, coolest=0.2, hottest=1.0, opening=8, min_p=1e-6, seed=3)
    write_stories(model, work / "stories", StoriesConfig(sampler, seconds, shortest=40))
    tokens, offsets = (np.load(work / "stories" / f"{name}.npy") for name in ("tokens", "offsets"))
    np.save(work / "train.npy", np.insert(tokens, offsets[:-1], START))
    np.save(work / "train_starts.npy", offsets[:-1] + np.arange(len(offsets) - 1))


def distill_config(seconds: float, *, batch: int, tokens_per_step: int) -> DistillConfig:
    """That of the bundled draft, within the context of this model."""
    full = full_recipe().distill
    train = replace(
        full.train, seconds=seconds, tokens_per_step=tokens_per_step, window=WINDOW, long_window=WINDOW, long_share=0.0
    )
    return replace(full, train=train, sampler=replace(full.sampler, batch=batch, context=WINDOW + 1))


def export(draft: Llama, like: Path, folder: Path) -> None:
    """A folder as the target's, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in like.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    shape = draft.shape
    config = json.loads((like / "config.json").read_text())
    config |= {"num_hidden_layers": shape.layers, "intermediate_size": shape.mlp, "dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    save_file(draft.weights(), folder / "model.safetensors", metadata={"format": "pt"})


def shapes_of(target: LlamaShape) -> list[LlamaShape]:
    """The candidates."""
    return [replace(target, layers=1, mlp=1152), replace(target, layers=2)]


def main() -> None:
    """Write, distil, export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write-seconds", type=float, default=90.0)
    parser.add_argument("--train-seconds", type=float, default=270.0)
    parser.add_argument("--batch", type=int, default=8192, help="stories written at once")
    parser.add_argument("--tokens-per-step", type=int, default=2**15)
    args = parser.parse_args()
    write_corpus(args.model, args.out, args.write_seconds, batch=args.batch)
    torch.manual_seed(1)
    target = load_model(args.model, read_shape(args.model)).requires_grad_(False)
    drafts = [start_draft(shape, target) for shape in shapes_of(target.shape)]
    config = distill_config(args.train_seconds, batch=args.batch, tokens_per_step=args.tokens_per_step)
    sampler = Sampler(target.weights(), target.shape, config.sampler, start=START)
    report = distil_drafts(sampler, target, drafts, args.out, config)
    for draft in drafts:
        export(draft, args.model, args.out / f"draft-{draft.shape.layers}")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
