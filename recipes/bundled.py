"""Make the bundled models: a deep, thin target and a shallow draft of one family, from story text to finished folders.

The stages run in order (stories, tokenizer, corpus, target, draft) and each leaves its result in the working folder, so that
one can be repeated alone. Every stage that uses the accelerator stops at a time budget. The target has many thin layers and the
draft one or two. On a CPU a step costs about the same per layer at this width, and speculation turns that difference into
speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from bundled_chat import ASSISTANT, END, EOT, SYSTEM, USER
from bundled_corpus import CorpusConfig, build_corpus, train_tokenizer
from bundled_stories import LlamaShape, Sampler, SamplerConfig, StoriesConfig, write_stories
from bundled_train import DistillConfig, Llama, TrainConfig, distil_drafts, held_out_losses, measure_drafts, start_draft
from bundled_train import train_target as run_target
from safetensors.torch import load_file, save_file

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    stories: StoriesConfig
    corpus: CorpusConfig
    target: LlamaShape
    target_train: TrainConfig
    drafts: tuple[LlamaShape, ...]
    distill: DistillConfig


def family_shape(layers: int, mlp: int) -> LlamaShape:
    """A member of the bundled family: only depth and the feed-forward width differ."""
    return LlamaShape(
        vocab=4096,
        hidden=256,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mlp=mlp,
        context=2048,
        rope_theta=10000.0,
        norm_eps=1e-5,
    )


def full_train(seconds: float, tokens_per_step: int, window: int) -> TrainConfig:
    """The optimiser settings of both runs."""
    return TrainConfig(
        seconds=seconds,
        tokens_per_step=tokens_per_step,
        window=window,
        long_window=2048,
        long_share=0.15,
        rate=3e-3,
        warmup_steps=150,
        decay=0.1,
        clip=1.0,
        seed=1,
    )


def full_recipe() -> Recipe:
    """The recipe of the shipped models, for one large GPU and about a quarter of an hour."""
    return Recipe(
        stories=StoriesConfig(
            sampler=SamplerConfig(batch=8192, context=256, coolest=0.65, hottest=0.95, opening=6, min_p=0.02, seed=1),
            seconds=100.0,
            shortest=40,
        ),
        corpus=CorpusConfig(
            vocab=4096,
            chat_share=0.18,
            rename_share=0.3,
            books_chars=0.035,
            code_chars=0.02,
            source_step=2,
            held_out=200,
            tokenizer_stories=30000,
            processes=os.cpu_count() or 1,
            seed=1,
        ),
        target=family_shape(layers=16, mlp=640),
        target_train=full_train(seconds=415.0, tokens_per_step=2**18, window=1024),
        drafts=(family_shape(layers=1, mlp=1024), family_shape(layers=2, mlp=768)),
        distill=DistillConfig(
            train=full_train(seconds=200.0, tokens_per_step=2**17, window=512),
            sampler=SamplerConfig(batch=8192, context=513, coolest=0.0, hottest=1.0, opening=8, min_p=1e-6, seed=2),
            rounds=4,
            own_share=0.6,
            divergence=1.0,
            variation=1.0,
            data=0.05,
        ),
    )


def smoke_recipe() -> Recipe:
    """The same path at toy scale: a minute or two on a CPU, and models that only babble."""
    full = full_recipe()
    train = replace(full.target_train, seconds=8.0, tokens_per_step=512, window=64, long_window=128, warmup_steps=5)
    small = replace(full.target, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=128)
    sampler = replace(full.distill.sampler, batch=24, context=65)
    return Recipe(
        stories=replace(full.stories, sampler=replace(full.stories.sampler, batch=16), seconds=1.0),
        corpus=replace(full.corpus, chat_share=0.5, held_out=3, tokenizer_stories=100, processes=2),
        target=small,
        target_train=train,
        drafts=(replace(small, layers=1), replace(small, layers=1, mlp=192)),
        distill=replace(full.distill, train=replace(train, seconds=4.0), sampler=sampler, rounds=1),
    )


def model_config(shape: LlamaShape) -> dict[str, object]:
    """A bundled model's shape in Hugging Face terms, with its special tokens."""
    return {
        **shape.config(),
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": [0, 4],
        "dtype": "bfloat16",
    }


def tokenizer_config(context: int) -> dict[str, object]:
    """What a tokenizer loader needs besides the vocabulary."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "pad_token": EOT,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, content: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(model: Llama, tokenizer: Path, folder: Path) -> None:
    """Write a model as a complete Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model_config(model.shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 4], "pad_token_id": 0})
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.shape.context))
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def load_model(folder: Path, shape: LlamaShape) -> Llama:
    """Read back an exported model."""
    model = Llama(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    return model


def target_stage(work: Path, out: Path, recipe: Recipe) -> None:
    """Train and export the target."""
    model, report = run_target(recipe.target, work, recipe.target_train)
    export(model, work / "tokenizer.json", out / "target")
    write_json(work / "target.json", report)
    print("target:", json.dumps(report), flush=True)


def expected_gain(shape: LlamaShape, target: LlamaShape, accepted: float) -> float:
    """Speed over plain decoding with four proposals a round, if each layer and each output head cost the same."""
    return (accepted + 1) / (1 + 4 * (shape.layers + 1) / (target.layers + 1))


def draft_stage(work: Path, out: Path, recipe: Recipe) -> None:
    """Distil all draft candidates, keep them in the working folder, and ship the one that promises most."""
    torch.manual_seed(recipe.distill.train.seed)
    target = load_model(out / "target", recipe.target).requires_grad_(False)
    drafts = [start_draft(shape, target) for shape in recipe.drafts]
    sampler = Sampler(target.weights(), target.shape, recipe.distill.sampler, start=0)
    report = distil_drafts(sampler, target, drafts, work, recipe.distill)
    names = [f"draft-{shape.layers}x{shape.mlp}" for shape in recipe.drafts]
    for name, draft in zip(names, drafts, strict=True):
        export(draft, work / "tokenizer.json", work / name)
        held = held_out_losses(draft, work)
        report |= {f"{name}_{kind}": loss for kind, loss in held.items()}
    report |= measure_drafts(sampler, target, drafts, work)
    gains = [
        sum(expected_gain(shape, recipe.target, report[f"{kind}_draft{i}_accepted_of_4"]) for kind in ("story", "chat")) / 2
        for i, shape in enumerate(recipe.drafts)
    ]
    report |= {f"{name}_expected_gain": gain for name, gain in zip(names, gains, strict=True)}
    shutil.copytree(work / names[gains.index(max(gains))], out / "draft", dirs_exist_ok=True)
    write_json(work / "draft.json", report)
    print("draft:", json.dumps(report), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with models/, text/ and prompts/")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/ and draft/")
    parser.add_argument("--work", type=Path, default=Path("build/bundled"), help="folder for what lies between the stages")
    parser.add_argument("--stage", default="all", choices=("stories", "tokenizer", "corpus", "target", "draft", "all"))
    parser.add_argument("--smoke", action="store_true", help="toy scale, to try the code on a CPU")
    for stage in ("stories", "target", "draft"):
        parser.add_argument(f"--{stage}-seconds", type=float, help=f"time budget of stage {stage}")
    return parser.parse_args()


def chosen_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe with the time budgets of the command line."""
    recipe = smoke_recipe() if arguments.smoke else full_recipe()
    if arguments.stories_seconds:
        recipe = replace(recipe, stories=replace(recipe.stories, seconds=arguments.stories_seconds))
    if arguments.target_seconds:
        recipe = replace(recipe, target_train=replace(recipe.target_train, seconds=arguments.target_seconds))
    if arguments.draft_seconds:
        train = replace(recipe.distill.train, seconds=arguments.draft_seconds)
        recipe = replace(recipe, distill=replace(recipe.distill, train=train))
    return recipe


def main() -> None:
    """Run one stage or all of them."""
    arguments = parse_arguments()
    recipe, data, work, out = chosen_recipe(arguments), arguments.data, arguments.work, arguments.out
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / "recipe.json", asdict(recipe))
    stages: dict[str, Callable[[], None]] = {
        "stories": lambda: write_stories(data / "models/stories15M", work / "stories", recipe.stories),
        "tokenizer": lambda: train_tokenizer(data, work, recipe.corpus),
        "corpus": lambda: build_corpus(data, work, recipe.corpus),
        "target": lambda: target_stage(work, out, recipe),
        "draft": lambda: draft_stage(work, out, recipe),
    }
    for name, stage in stages.items():
        if arguments.stage in (name, "all"):
            began = time.monotonic()
            stage()
            print(f"{name}: done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
