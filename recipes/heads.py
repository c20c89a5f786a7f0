"""Make heads for the bundled target, all on the same target passes: the four that are bundled (Medusa, Hydra++, EAGLE-1 and
EAGLE-3), or any others.

The target writes its own training text (unconditionally, from its begin-of-text token, at mixed temperatures), because a
drafter has to follow the target, not a corpus. The heads learn its laws, and the best checkpoint of each by accepted length is
kept.

    python recipes/heads.py --stage write --stage train --out build/heads          # on a GPU, about six minutes
    python recipes/heads.py --stage install --out build/heads                      # into src/outrider/bundled/heads
    python recipes/heads.py --stage judge --prompts build/bundled                  # tokens per pass on held-out prompts
    python recipes/heads.py --stage write --stage train --stage judge --kinds mtp,p-eagle --steps 1500 --batch 32   # others
    python recipes/heads.py --stage train --kinds eagle3 --begin src/outrider/bundled/heads --steps 2000     # goes on learning
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
from accepted import held_prompts
from bundled_stories import CUT, LlamaShape, Sampler, SamplerConfig
from safetensors.torch import load_file

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads import Head, load_head, save_head
from outrider.models.heads.embedding_and_output import read_target
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
    "fspad": ({"intermediate_size": 1280}, HeadSettings(num_depths=3, loss="mixed", feature_weight=0.5, noise=0.02)),
    "falcon": (
        {"intermediate_size": 1280},
        HeadSettings(num_depths=4, loss="mixed", feature_weight=0.5, noise=0.02, glance=0.4),
    ),
    "chimera": ({"num_heads": 4, "own_readouts": False}, HeadSettings(num_depths=4, loss="mixed")),
    "mlp-speculator": ({"num_heads": 4, "scale_input": True}, HeadSettings(num_depths=4, loss="mixed")),
    "redrafter": ({"exit_dim": 256, "num_blocks": 2}, HeadSettings(num_depths=5, loss="mixed")),
    "mtp": ({"num_heads": 4}, HeadSettings(num_depths=4, loss="mixed")),
    "mtp-parallel": ({"num_heads": 4}, HeadSettings(num_depths=4, loss="mixed")),
    "l-mtp": ({"num_heads": 4, "stride": 2}, HeadSettings(num_depths=4, loss="mixed")),
    "p-eagle": (
        {"num_heads": 5, "num_layers": 2, "intermediate_size": 1280, "mask_token_id": 1},
        HeadSettings(num_depths=5, loss="mixed"),
    ),
    "dflash": (
        {"num_heads": 5, "num_layers": 2, "intermediate_size": 1280, "mask_token_id": 1},
        HeadSettings(num_depths=5, loss="mixed", decay=0.78),
    ),
    "dspark": (
        {"num_heads": 5, "num_layers": 2, "intermediate_size": 1280, "mask_token_id": 1, "markov_rank": 64},
        HeadSettings(num_depths=5, loss="l1-kl", decay=0.78, confidence_weight=1.0),
    ),
}
"""Not bundled: they would not fit, and EAGLE is accepted more."""
MEDUSA2 = "medusa2"
JOINT = JointSettings(loss="mixed", head_warmup=200, lora_rank=16)


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


def heads_from(folder: Path, target: Target, kinds: Kinds) -> list[Head]:
    """Heads that go on learning, in float32."""
    heads = [load_head(folder / kind, target, dtype=torch.float32) for kind in kinds]
    for head in heads:
        head.freeze()
        head.train()
    return heads


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


def train_stage(out: Path, recipe: Recipe, kinds: Kinds, *, text: Path, begin: Path | None, joint: bool) -> None:
    """All heads at once, from those in ``begin`` or from nothing, and Medusa-2 beside them if it is wanted."""
    on_gpu = torch.cuda.is_available()
    torch._dynamo.config.suppress_errors = True  # slower is better than not at all
    target = load_model(bundled_path("target"), device="cuda" if on_gpu else "cpu", fast=not on_gpu)
    tokens = np.load(text)
    corpus = Corpus.of(read_documents([text], None, max_len=10_000), held_out=256 if on_gpu else 8)
    objectives: list[Objective] = [
        HeadObjective(
            head,
            target,
            kinds[head.config.kind][1],
            compiled=on_gpu,
            chunk=1 << 29 if on_gpu else 1 << 24,
            recompute=not on_gpu,
        )
        for head in (heads_from(begin, target, kinds) if begin else new_heads(target, tokens, recipe, kinds))
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


def install_stage(out: Path, kinds: Kinds) -> None:
    """Into the package, without what the bundled target has anyway."""
    for kind in kinds:
        folder = out / "heads" / kind
        notes = json.loads((folder / "provenance.json").read_text())
        save_head(load_head(folder), BUNDLED / kind, target_folder="../../target", notes=notes)
    size = sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file())
    print(f"install: {size / 1e6:.1f} MB in {BUNDLED}")


def judge_stage(texts: list[list[int]], folders: dict[str, Path], *, temperature: float, nodes: int, eager: bool) -> None:
    """Tokens per target pass on held-out prompts, with the engine itself, of the heads in ``folders``. ``eager`` is quick to
    start on a GPU and in float32, so that texts can be compared."""
    how: dict[str, Any] = {"fast": False, "dtype": "float32", "max_batch_size": 32} if eager else {}
    llm = LLM(method="best-first", **how)  # loads the draft model too, to compare with
    params = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
    plain = llm.generate(texts, params, method=llm.compose("plain"))
    for name in ("best-first", *folders):
        if name == MEDUSA2:  # the target is another one
            llm = LLM(str(folders[name] / "target"), method="plain", **how)
            plain = llm.generate(texts, params)
        more = {} if name == "best-first" else {"heads": str(folders[name] / "heads" if name == MEDUSA2 else folders[name])}
        method = llm.compose("medusa" if name == MEDUSA2 else name, num_tree_nodes=nodes, **more)
        outputs = llm.generate(texts, params, method=method)
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True))
        half = len(texts) // 2
        kinds = [outputs[:half], outputs[half:]]
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
    known = {**HEADS, **OTHERS}
    parser.add_argument(
        "--kinds", default=",".join(HEADS), help=f"of {', '.join((*known, MEDUSA2))}; the bundled ones if not given"
    )
    parser.add_argument("--text", type=Path, help="windows to learn from, if not those of stage write")
    parser.add_argument("--begin", type=Path, help="folder of heads that go on learning")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="windows per step")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    arguments = parser.parse_args()
    recipe = chosen_recipe(arguments)
    names = arguments.kinds.split(",")
    kinds = {name: known[name] for name in names if name != MEDUSA2}
    for stage in arguments.stage:
        began = time.monotonic()
        if stage == "write":
            write_stage(arguments.out, recipe)
        elif stage == "train":
            text = arguments.text or arguments.out / "own.npy"
            train_stage(arguments.out, recipe, kinds, text=text, begin=arguments.begin, joint=MEDUSA2 in names)
        elif stage == "install":
            install_stage(arguments.out, kinds)
        else:
            here = arguments.out / "heads"
            folders = {name: here / name if (here / name).is_dir() else BUNDLED / name for name in names}
            texts = [text for kind in ("story", "chat") for text in held_prompts(arguments.prompts, kind, arguments.count)]
            judge_stage(texts, folders, temperature=arguments.temperature, nodes=arguments.nodes, eager=arguments.eager)
        print(f"{stage}: done in {time.monotonic() - began:.0f} s", flush=True)


def chosen_recipe(arguments: argparse.Namespace) -> Recipe:
    """With what the command line says otherwise."""
    recipe = smoke_recipe() if arguments.smoke else full_recipe()
    given = {
        "max_seconds": arguments.train_seconds,
        "max_steps": arguments.steps,
        "batch_size": arguments.batch,
        "learning_rate": arguments.rate,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if arguments.steps and not arguments.train_seconds:
        changes["max_seconds"] = None
    return replace(recipe, rounds=arguments.rounds or recipe.rounds, settings=replace(recipe.settings, **changes))


if __name__ == "__main__":
    main()
