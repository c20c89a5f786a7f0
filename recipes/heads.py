"""Make heads for the bundled target, all on the same target passes: the four that are bundled (Medusa, Hydra++, EAGLE-1 and
EAGLE-3), or any others.

The target writes its own training text (unconditionally, from its begin-of-text token, at mixed temperatures: what a
drafter has to follow is the target, not a corpus), the heads learn its laws, and the best checkpoint of each by accepted
length is kept.

    python recipes/heads.py --stage write --stage train --out build/heads          # on a GPU, about six minutes
    python recipes/heads.py --stage install --out build/heads                      # into src/outrider/bundled/heads
    python recipes/heads.py --stage judge --prompts build/bundled                  # tokens per pass on held-out prompts
    python recipes/heads.py --stage write --stage train --stage judge --others --rounds 1 --train-seconds 100   # the others
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from bundled_stories import CUT, LlamaShape, Sampler, SamplerConfig
from safetensors.torch import load_file

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads import Head, load_head, save_head
from outrider.models.heads.ends import read_target
from outrider.models.heads.folder import new_config, new_head, signature_of
from outrider.models.load import load_model
from outrider.train.data import Corpus, read_documents
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings, Objective
from outrider.train.objective_joint import JointSettings, new_joint

Kinds = dict[str, tuple[dict[str, Any], HeadSettings]]
BUNDLED = Path(__file__).parents[1] / "src/outrider/bundled/heads"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    rounds: int  # of target-written windows, one batch of the sampler each
    sampler: SamplerConfig
    settings: Settings
    draft_vocab: int  # of EAGLE-3


HEADS: dict[str, tuple[dict[str, Any], HeadSettings]] = {
    "medusa": ({"num_heads": 4}, HeadSettings(num_depths=4, loss="mixed")),
    "hydra": (
        {"num_heads": 4, "num_blocks": 3, "own_readouts": False, "prefix": True},
        HeadSettings(num_depths=4, loss="mixed"),
    ),
    "eagle1": ({"intermediate_size": 1280}, HeadSettings(num_depths=3, loss="mixed", feature_weight=0.5, noise=0.02)),
    "eagle3": ({"intermediate_size": 1280}, HeadSettings(num_depths=5, loss="mixed")),
}
OTHERS: dict[str, tuple[dict[str, Any], HeadSettings]] = {
    "mlp-speculator": ({"num_heads": 4, "scale_input": True}, HeadSettings(num_depths=4, loss="mixed")),
    "redrafter": ({"exit_dim": 256, "num_blocks": 2}, HeadSettings(num_depths=5, loss="mixed")),
    "mtp": ({"num_heads": 4}, HeadSettings(num_depths=4, loss="mixed")),
    "mtp-parallel": ({"num_heads": 4}, HeadSettings(num_depths=4, loss="mixed")),
    "l-mtp": ({"num_heads": 4, "stride": 2}, HeadSettings(num_depths=4, loss="mixed")),
    "p-eagle": (
        {"num_heads": 5, "num_layers": 2, "intermediate_size": 1280, "mask_token_id": 1},
        HeadSettings(num_depths=5, loss="mixed"),
    ),
}
"""Not bundled: they would not fit, and EAGLE is accepted more."""
JOINT = JointSettings(loss="mixed", head_warmup=60, lora_rank=16)


def full_recipe() -> Recipe:
    """For one large GPU."""
    sampler = SamplerConfig(batch=8192, context=513, coolest=0.0, hottest=1.0, opening=8, min_p=1e-6, seed=11)
    settings = Settings(
        max_steps=100_000,
        max_seconds=270.0,
        batch_size=128,
        row_len=512,
        learning_rate=2e-3,
        warmup_steps=60,
        bf16=True,
        judge_every=100,
        save_every=100_000,
        patience=1000,
        seed=1,
    )
    return Recipe(rounds=5, sampler=sampler, settings=settings, draft_vocab=2560)


def smoke_recipe() -> Recipe:
    """The same path in a minute on a CPU."""
    full = full_recipe()
    settings = replace(full.settings, max_seconds=20.0, batch_size=4, row_len=48, bf16=False, judge_every=5, warmup_steps=2)
    return Recipe(rounds=1, sampler=replace(full.sampler, batch=48, context=49), settings=settings, draft_vocab=2560)


def write_stage(out: Path, recipe: Recipe) -> None:
    """Text of the target's own."""
    folder = Path(bundled_path("target"))
    raw = json.loads((folder / "config.json").read_text())
    shape = LlamaShape(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        mlp=raw["intermediate_size"],
        context=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )
    config = recipe.sampler
    sampler = Sampler(load_file(folder / "model.safetensors"), shape, config, start=0)
    rounds = []
    for _ in range(recipe.rounds):
        prompts = torch.full((config.batch, config.context), CUT, device=sampler.device)
        prompts[:, 0] = 0
        heat = (torch.rand(config.batch, device=sampler.device) * 1.75 - 0.5).clamp(0, 1)  # a quarter of them greedy
        rounds.append(sampler.continue_from(prompts, heat, config.opening).numpy())
        print(f"write: {len(rounds)} of {recipe.rounds} rounds", flush=True)
    windows = np.concatenate(rounds).astype(np.int16)
    windows[::2, :-1] = windows[::2, 1:]  # half without the opening mark, because prompts come both ways
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "own.npy", windows[:, :-1])


def new_heads(target: Target, tokens: np.ndarray, recipe: Recipe, kinds: Kinds) -> list[Head]:
    """Untrained heads; EAGLE-3 and P-EAGLE speak the commonest tokens."""
    raw, ends = read_target(bundled_path("target"))
    counts = np.bincount(tokens.ravel(), minlength=raw["vocab_size"])
    ids = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: recipe.draft_vocab]))
    print(f"train: {recipe.draft_vocab} tokens cover {counts[ids.numpy()].sum() / counts.sum():.4f} of the text", flush=True)
    heads = []
    for kind, (changes, _) in kinds.items():
        small = kind in ("eagle3", "p-eagle")
        config = new_config(kind, raw, **changes, **({"draft_vocab_size": recipe.draft_vocab} if small else {}))
        config = replace(config, signature=signature_of(target, config.hidden_size))
        heads.append(new_head(config, ends, ids=ids if small else None).to(target.device))
    return heads


def train_stage(out: Path, recipe: Recipe, kinds: Kinds, *, joint: bool) -> None:
    """All heads at once, and Medusa-2 beside them if it is wanted."""
    on_gpu = torch.cuda.is_available()
    torch._dynamo.config.suppress_errors = True  # slower is better than not at all
    target = load_model(bundled_path("target"), device="cuda" if on_gpu else "cpu", fast=not on_gpu)
    tokens = np.load(out / "own.npy")
    corpus = Corpus.of(read_documents([out / "own.npy"], None, max_len=10_000), held_out=256 if on_gpu else 8)
    objectives: list[Objective] = [
        HeadObjective(
            head,
            target,
            kinds[head.config.kind][1],
            compiled=on_gpu,
            chunk=1 << 29 if on_gpu else 1 << 24,
            recompute=not on_gpu,
        )
        for head in new_heads(target, tokens, recipe, kinds)
    ]
    if joint:
        objectives.append(new_joint(bundled_path("target"), target, JOINT))
    print(f"train: {tokens.size / 1e6:.1f}M tokens", flush=True)
    began = time.monotonic()
    notes = {
        "data": f"{tokens.size} tokens written by the bundled target (recipes/heads.py)",
        "target": "outrider bundled target",
    }
    runs = train(objectives, target, corpus, out / "heads", settings=recipe.settings, notes=notes)
    for run in runs:
        print(run.objective.name, [(e["step"], e["accepted_length"]) for e in run.history[::3]], run.history[-1], flush=True)
    print(f"train: {time.monotonic() - began:.0f} s", flush=True)


def install_stage(out: Path) -> None:
    """Into the package, without what the bundled target has anyway."""
    for kind in HEADS:
        folder = out / "heads" / kind
        notes = json.loads((folder / "provenance.json").read_text())
        save_head(load_head(folder), BUNDLED / kind, ends="../../target", notes=notes)
    size = sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file())
    print(f"install: {size / 1e6:.1f} MB in {BUNDLED}")


def judge_stage(prompts: Path, folders: dict[str, Path], *, count: int, temperature: float, nodes: int, eager: bool) -> None:
    """Tokens per target pass on held-out prompts, with the engine itself, of the heads in ``folders``. ``eager`` is quick to
    start on a GPU and in float32, so that texts can be compared."""
    how: dict[str, Any] = {"fast": False, "dtype": "float32", "max_batch_size": 32} if eager else {}
    llm = LLM(method="best-first", **how)  # loads the draft model too, to compare with
    texts: list[list[int]] = []
    for kind in ("story", "chat"):
        tokens = np.load(prompts / f"held_{kind}.npy")
        starts = np.load(prompts / f"held_{kind}_starts.npy")
        for start in starts[:count]:
            window = tokens[start : start + 400].tolist()
            end = window.index(2) + 2 if kind == "chat" and 2 in window[:300] else 24
            texts.append(window[:end])
    params = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
    plain = llm.generate(texts, params, method=llm.compose("plain"))
    for name in ("best-first", *folders):
        if name == "medusa2":  # the target is another one
            llm = LLM(str(folders[name] / "target"), method="plain", **how)
            plain = llm.generate(texts, params)
        more = {} if name == "best-first" else {"heads": str(folders[name] / "heads" if name == "medusa2" else folders[name])}
        method = llm.compose("medusa" if name == "medusa2" else name, num_tree_nodes=nodes, **more)
        outputs = llm.generate(texts, params, method=method)
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True))
        kinds = [outputs[:count], outputs[count:]]
        rates = [sum(o.stats.num_tokens for o in part) / sum(o.stats.num_passes for o in part) for part in (outputs, *kinds)]
        found = f"{rates[0]:.2f} tokens per pass (story {rates[1]:.2f}, chat {rates[2]:.2f})"
        print(f"{name:14} {found}, {same} of {len(texts)} texts equal plain decoding", flush=True)


def main() -> None:
    """Run the named stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=("write", "train", "install", "judge"), required=True)
    parser.add_argument("--out", type=Path, default=Path("build/heads"))
    parser.add_argument(
        "--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy and held_chat.npy"
    )
    parser.add_argument("--count", type=int, default=16, help="prompts of each kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, default=32, help="guesses per round")
    parser.add_argument("--train-seconds", type=float)
    parser.add_argument("--rounds", type=int, help="of 8192 texts that the target writes")
    parser.add_argument("--eager", action="store_true", help="judge with the plain decoder in float32")
    parser.add_argument("--others", action="store_true", help="the heads that are not bundled, and Medusa-2")
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    arguments = parser.parse_args()
    recipe = smoke_recipe() if arguments.smoke else full_recipe()
    kinds = OTHERS if arguments.others else HEADS
    if arguments.rounds:
        recipe = replace(recipe, rounds=arguments.rounds)
    if arguments.train_seconds:
        recipe = replace(recipe, settings=replace(recipe.settings, max_seconds=arguments.train_seconds))
    for stage in arguments.stage:
        began = time.monotonic()
        if stage == "write":
            write_stage(arguments.out, recipe)
        elif stage == "train":
            train_stage(arguments.out, recipe, kinds, joint=arguments.others)
        elif stage == "install":
            install_stage(arguments.out)
        else:
            trained = {kind: arguments.out / "heads" / kind for kind in (*OTHERS, "medusa2")}
            folders = trained if arguments.others else {kind: BUNDLED / kind for kind in HEADS}
            chosen = {"count": arguments.count, "temperature": arguments.temperature, "nodes": arguments.nodes}
            judge_stage(arguments.prompts, folders, **chosen, eager=arguments.eager)
        print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
