"""A small vision-language model that describes grids of coloured shapes, and what drafters guess of its captions.

python recipes/grid_captions.py --out build/grid                       # trains target and text-only draft, then measures
python recipes/grid_captions.py --out build/grid --measure-only

A scene is a 3 x 3 grid; most cells are blank. The caption names every cell, in one of two styles chosen at random, and ends
with a count. The draft model sees the words and the image's placeholders, never the pixels: what it can guess is the form.
The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from outrider import LLM, SamplingParams
from outrider.core.request import Origin

SIDE, CELL = 3, 8
COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1), "yellow": (1, 1, -1)}
SHAPES = ("square", "bar", "cross", "dot")
SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
WORDS = (*SPECIAL, *COLOURS, *SHAPES, *"describe blank nothing row first second third line there are things".split())
WORDS = (*WORDS, *":;,.", *(str(number) for number in range(SIDE * SIDE + 1)))
IDS = {word: number for number, word in enumerate(WORDS)}
PROMPT = "<s> <image> describe :"
NUM_PLACES = SIDE * SIDE
METHODS: dict[str, dict[str, Any]] = {
    "draft-model": {"num_draft_tokens": 4},
    "draft-tree": {"num_draft_tokens": 4, "num_tree_nodes": 16},
    "suffix": {"num_draft_tokens": 4},
    "prompt-lookup": {"num_draft_tokens": 4},
}

Scene = list[tuple[str, str] | None]
"""Colour and shape of every cell; None for a blank one."""


def scene_of(chance: random.Random, num_things: int = 4) -> Scene:
    cells: Scene = [None] * (SIDE * SIDE)
    for cell in chance.sample(range(len(cells)), num_things):
        cells[cell] = (chance.choice(list(COLOURS)), chance.choice(SHAPES))
    return cells


def picture_of(scene: Scene) -> Tensor:
    """[3, H, W] pixels between -1 and 1, a patch of the model for each cell."""
    pixels = torch.zeros(3, SIDE * CELL, SIDE * CELL)
    for number, cell in enumerate(scene):
        if cell is not None:
            top, left = number // SIDE * CELL, number % SIDE * CELL
            colour = torch.tensor(COLOURS[cell[0]], dtype=torch.float32)
            pixels[:, top : top + CELL, left : left + CELL] = colour[:, None, None] * _mask(cell[1])
    return pixels


def _mask(shape: str) -> Tensor:
    mask = torch.zeros(CELL, CELL)
    mask[3:5, 1:7] = 1
    if shape == "cross":
        mask[1:7, 3:5] = 1
    elif shape == "square":
        mask[1:7, 1:7] = 1
    elif shape == "dot":
        mask[:, :3] = mask[:, 5:] = 0
    return mask


def caption_of(scene: Scene, style: int) -> str:
    names = [f"row {row + 1}" for row in range(SIDE)] if style == 0 else ["first line", "second line", "third line"]
    blank = "blank" if style == 0 else "nothing"
    lines = []
    for row, name in enumerate(names):
        cells = scene[row * SIDE : (row + 1) * SIDE]
        lines.append(f"{name} : " + " , ".join(blank if cell is None else " ".join(cell) for cell in cells))
    return " ; ".join(lines) + f" . there are {sum(cell is not None for cell in scene)} things . </s>"


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def batch_of(chance: random.Random, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, tokens with placeholders written out, and labels that leave prompts and padding out."""
    scenes = [scene_of(chance) for _ in range(size)]
    prompt = [part for token in ids_of(PROMPT) for part in [token] * (NUM_PLACES if token == IDS["<image>"] else 1)]
    captions = [ids_of(caption_of(scene, chance.randrange(2))) for scene in scenes]
    longest = max(map(len, captions))
    rows = [prompt + caption + [IDS["<pad>"]] * (longest - len(caption)) for caption in captions]
    labels = [[-100] * len(prompt) + caption + [-100] * (longest - len(caption)) for caption in captions]
    return torch.stack([picture_of(scene) for scene in scenes]), torch.tensor(rows), torch.tensor(labels)


def text_config(width: int, num_layers: int) -> LlamaConfig:
    ends: dict[str, Any] = {"bos_token_id": IDS["<s>"], "eos_token_id": IDS["</s>"], "pad_token_id": IDS["<pad>"]}
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers}
    return LlamaConfig(**sizes, **ends, num_attention_heads=4, vocab_size=len(WORDS), max_position_embeddings=128)


def new_target() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    eyes = CLIPVisionConfig(**sizes, image_size=SIDE * CELL, patch_size=CELL, projection_dim=64)
    config = LlavaConfig(
        vision_config=eyes, text_config=text_config(96, 3), image_token_index=IDS["<image>"], vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def train(model: Any, steps: int, batch: int, *, sees: bool, device: str) -> float:
    """Teach a model captions; the mean loss of the last tenth."""
    chance, losses = random.Random(0), list[float]()
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pixels, tokens, labels = (part.to(device) for part in batch_of(chance, batch))
        more = {"pixel_values": pixels} if sees else {}
        loss = model(input_ids=tokens, labels=labels, attention_mask=(tokens != IDS["<pad>"]).long(), **more).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def save(model: Any, folder: Path) -> None:
    model.to("cpu").save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))


def measure(target: Path, draft: Path, num_scenes: int) -> dict[str, Any]:
    """Captions of held-out scenes: how many are right, and how every method drafts them. Texts must be plain decoding's."""
    chance = random.Random(1)
    scenes = [scene_of(chance) for _ in range(num_scenes)]
    llm = LLM(str(target), draft=str(draft), method="draft-model", dtype="float32", device="cpu")
    prompts = [{"prompt": ids_of(PROMPT), "images": [{"pixel_values": picture_of(scene)[None]}]} for scene in scenes]
    params = SamplingParams(max_tokens=80, temperature=0)
    plain = [list(one.token_ids) for one in llm.generate(prompts, params, method="plain")]
    right = [any(said == ids_of(caption_of(scene, style)) for style in (0, 1)) for said, scene in zip(plain, scenes)]
    found: dict[str, Any] = {"scenes": num_scenes, "right": sum(right) / len(right)}
    for name, options in METHODS.items():
        outputs = llm.generate(prompts, params, method=llm.compose(name, **options))
        assert [list(one.token_ids) for one in outputs] == plain, f"{name} changed the text"
        tokens, passes = (sum(vars(one.stats)[key] for one in outputs) for key in ("num_tokens", "num_passes"))
        found[name] = {"tokens_per_pass": round(tokens / passes, 3), "accepted_by_third": thirds([o.origins for o in outputs])}
        print(f"{name}: {found[name]}", flush=True)
    return found


def thirds(origins: Sequence[Sequence[Origin]]) -> list[float]:
    """Share of accepted tokens in the first, second and last third of the captions."""
    parts: list[list[bool]] = [[], [], []]
    for row in origins:
        for place, origin in enumerate(row):
            parts[3 * place // len(row)].append(origin is Origin.ACCEPTED)
    return [round(sum(part) / max(1, len(part)), 3) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--measure-only", action="store_true")
    arguments = parser.parse_args()
    folders = arguments.out / "target", arguments.out / "draft"
    losses = []
    if not arguments.measure_only:
        torch.manual_seed(0)
        for model, folder in zip((new_target(), LlamaForCausalLM(text_config(64, 1))), folders, strict=True):
            losses.append(train(model, arguments.steps, arguments.batch, sees=folder == folders[0], device=arguments.device))
            save(model, folder)
    found = measure(*folders, arguments.scenes)
    print(json.dumps({"steps": arguments.steps, "losses": [round(loss, 4) for loss in losses], **found}))


if __name__ == "__main__":
    main()
