"""FastDraft: a small draft for any target, from nothing, in three steps (Zafrir et al. 2024, arXiv 2411.11055).

A draft needs the target's vocabulary and little else. It is pre-trained on text with the target's tokenizer, then aligned. The
target answers prompts in its own words, and the draft goes on learning from these answers by the same cross-entropy. A last
step, which the paper leaves out and `--distill` adds, learns the target's whole law on them instead of the words it chose.

    python recipes/fastdraft.py --target MODEL --text corpus.jsonl --prompts chats.jsonl --out runs/fastdraft --distill
    outrider generate "..." --model MODEL --draft runs/fastdraft/distill/distill --method draft-model
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.bundled import bundled_path
from outrider.cli.main import main as outrider


def ran(*words: str) -> None:
    """One command of ours; a failure ends the recipe, and the same call goes on from there."""
    print("outrider", *words, flush=True)
    code = outrider(list(words))
    if code:
        raise SystemExit(code)


def options(given: list[str], **more: object) -> list[str]:
    """`-O` for everything."""
    return [word for pair in (*given, *(f"{name}={value}" for name, value in more.items())) for word in ("-O", pair)]


def main() -> None:
    """Pre-train, regenerate, align, distil."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=bundled_path("target"))
    parser.add_argument("--text", nargs="+", required=True, help="what the draft is pre-trained on")
    parser.add_argument("--prompts", nargs="+", required=True, help="what the target answers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--shape", nargs="*", default=[], help="num_hidden_layers=2 hidden_size=512 ...: entries of config.json"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of pre-training")
    parser.add_argument("--align-steps", type=int, default=4_000)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--distill", action="store_true", help="learn the target's laws on its answers at the end")
    parser.add_argument("--setting", nargs="*", default=[], help="of all training steps: batch_size=64 ...")
    arguments = parser.parse_args()
    out, target = arguments.out, ["--target", arguments.target]
    shape = options([*arguments.setting, *arguments.shape], max_steps=arguments.steps)
    ran("train", "pretrain", *target, "--data", *arguments.text, "--out", str(out / "pretrain"), *shape)
    own = out / "own.jsonl"
    ran(
        "train",
        "regenerate",
        *target,
        "--data",
        *arguments.prompts,
        "--out",
        str(own),
        "--max-tokens",
        str(arguments.max_tokens),
    )
    settings, draft = options(arguments.setting, max_steps=arguments.align_steps), out / "pretrain" / "pretrain"
    ran("train", "pretrain", *target, "--draft", str(draft), "--data", str(own), "--out", str(out / "align"), *settings)
    if arguments.distill:
        draft = out / "align" / "pretrain"
        settings = options(arguments.setting, max_steps=arguments.align_steps, loss="mixed")
        ran("train", "distill", *target, "--draft", str(draft), "--data", str(own), "--out", str(out / "distill"), *settings)


if __name__ == "__main__":
    main()
