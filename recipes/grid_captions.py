"""A small vision-language model that describes grids of coloured shapes, and what text-only drafters guess of its captions.

python recipes/grid_captions.py --out build/grid                       # trains target and text-only draft, then measures
python recipes/grid_captions.py --out build/grid --parts measure

A scene is a 3 x 3 grid; most cells are blank. The caption names every cell, in one of two styles chosen at random, and ends
with a count. Another question asks for the number of things of each colour. A prompt holds one picture of the scene among blank
ones, up to ``--most-images`` in all: blank pictures add visual tokens and no content. Some captions have no picture at all. The
draft model sees the words and the placeholders, never the pixels: what it can guess is the form. Drafters that see are trained
by ``grid_drafters.py``.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
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
WORDS = (*SPECIAL, *COLOURS, *SHAPES, *"describe count blank nothing row first second third line there are things".split())
WORDS = (*WORDS, *":;,.", *(str(number) for number in range(SIDE * SIDE + 1)))
IDS = {word: number for number, word in enumerate(WORDS)}
QUESTIONS = ("describe", "count")
NUM_PLACES = SIDE * SIDE
PARTS = ("target", "draft", "measure")
METHODS: dict[str, dict[str, Any]] = {
    "draft-model": {"num_draft_tokens": 4},
    "draft-tree": {"num_draft_tokens": 4, "num_tree_nodes": 16},
    "suffix": {"num_draft_tokens": 4},
    "prompt-lookup": {"num_draft_tokens": 4},
}

Scene = list[tuple[str, str] | None]
"""Colour and shape of every cell; None for a blank one."""
BLANK: Scene = [None] * NUM_PLACES


@dataclass(frozen=True)
class Sample:
    """What a model is asked, and the answer."""

    scene: Scene
    pictures: tuple[bool, ...]
    """One for each picture in the prompt: it shows the scene, or it is blank."""
    question: str
    style: int

    @property
    def prompt(self) -> str:
        return " ".join(["<s>", *["<image>"] * len(self.pictures), self.question, ":"])

    @property
    def answer(self) -> str:
        return caption_of(self.scene, self.style) if self.question == "describe" else counts_of(self.scene)

    @property
    def images(self) -> list[Tensor]:
        """[1, 3, H, W] each."""
        return [picture_of(self.scene if shown else BLANK)[None] for shown in self.pictures]


def sample_of(chance: random.Random, num_images: int, question: str = "describe") -> Sample:
    """A new scene, shown in one of so many pictures; with none of them, a caption that nothing is seen of."""
    shown = chance.randrange(num_images) if num_images else -1
    pictures = tuple(number == shown for number in range(num_images))
    return Sample(scene_of(chance), pictures, question, chance.randrange(2))


def any_sample(chance: random.Random, most_images: int) -> Sample:
    """As training sees them: one in eight is a caption without a picture, one in four of the others is a count."""
    if chance.random() < 1 / 8:
        return sample_of(chance, 0)
    sizes = [size for size in (1, 2, 4, 8) if size <= most_images]
    return sample_of(chance, chance.choice(sizes), "count" if chance.random() < 1 / 4 else "describe")


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
            pixels[:, top : top + CELL, left : left + CELL] = _tile(*cell)
    return pixels


@cache
def _tile(colour: str, shape: str) -> Tensor:
    """[3, h, w] pixels of a cell."""
    return torch.tensor(COLOURS[colour], dtype=torch.float32)[:, None, None] * _mask(shape)


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


def counts_of(scene: Scene) -> str:
    numbers = {colour: sum(cell is not None and cell[0] == colour for cell in scene) for colour in COLOURS}
    return " , ".join(f"{colour} {number}" for colour, number in numbers.items()) + " . </s>"


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


def batch_of(chance: random.Random, size: int, most_images: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of all pictures, tokens with placeholders written out, and labels that leave prompts and padding out."""
    samples = [any_sample(chance, most_images) for _ in range(size)]
    prompts = [written(sample.prompt) for sample in samples]
    answers = [ids_of(sample.answer) for sample in samples]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    rows = torch.full((size, longest), IDS["<pad>"])
    labels = torch.full((size, longest), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        rows[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    pixels = [image for sample in samples for image in sample.images]
    return torch.cat(pixels) if pixels else torch.zeros(0, 3, 1, 1), rows, labels


def written(prompt: str) -> list[int]:
    """Token ids with as many placeholders as pictures have places."""
    image = IDS["<image>"]
    return [part for token in ids_of(prompt) for part in [token] * (NUM_PLACES if token == image else 1)]


def text_config(width: int, num_layers: int) -> LlamaConfig:
    ends: dict[str, Any] = {"bos_token_id": IDS["<s>"], "eos_token_id": IDS["</s>"], "pad_token_id": IDS["<pad>"]}
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers}
    return LlamaConfig(**sizes, **ends, num_attention_heads=4, vocab_size=len(WORDS), max_position_embeddings=256)


def new_target() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    eyes = CLIPVisionConfig(**sizes, image_size=SIDE * CELL, patch_size=CELL, projection_dim=64)
    config = LlavaConfig(
        vision_config=eyes, text_config=text_config(96, 3), image_token_index=IDS["<image>"], vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def train(model: Any, steps: int, batch: int, most_images: int, *, sees: bool, device: str) -> float:
    """Teach a model captions; the mean loss of the last tenth."""
    chance, losses = random.Random(0), list[float]()
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pixels, tokens, labels = (part.to(device) for part in batch_of(chance, batch, most_images))
        more = {"pixel_values": pixels} if sees and len(pixels) else {}
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
    samples = [sample_of(chance, 1) for _ in range(num_scenes)]
    llm = LLM(str(target), draft=str(draft), method="draft-model", dtype="float32", device="cpu")
    prompts = [prompt_of(sample) for sample in samples]
    params = SamplingParams(max_tokens=80, temperature=0)
    plain = [list(one.token_ids) for one in llm.generate(prompts, params, method="plain")]
    right = [is_right(said, sample) for said, sample in zip(plain, samples, strict=True)]
    found: dict[str, Any] = {"scenes": num_scenes, "right": sum(right) / len(right)}
    for name, options in METHODS.items():
        outputs = llm.generate(prompts, params, method=llm.compose(name, **options))
        assert [list(one.token_ids) for one in outputs] == plain, f"{name} changed the text"
        tokens, passes = (sum(vars(one.stats)[key] for one in outputs) for key in ("num_tokens", "num_passes"))
        found[name] = {"tokens_per_pass": round(tokens / passes, 3), "accepted_by_third": thirds([o.origins for o in outputs])}
        print(f"{name}: {found[name]}", flush=True)
    return found


def prompt_of(sample: Sample) -> dict[str, Any]:
    """A prompt in the form that ``LLM.generate`` takes."""
    return {"prompt": ids_of(sample.prompt), "images": [{"pixel_values": image} for image in sample.images]}


def is_right(said: Sequence[int], sample: Sample) -> bool:
    """The answer is one that the scene allows; a caption may be in either style."""
    return any(list(said) == ids_of(replace(sample, style=style).answer) for style in (0, 1))


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
    parser.add_argument("--most-images", type=int, default=1, help="pictures in a prompt, all but one of them blank")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    arguments = parser.parse_args()
    folders = {part: arguments.out / part for part in ("target", "draft")}
    makers = {"target": new_target, "draft": lambda: LlamaForCausalLM(text_config(64, 1))}
    losses: dict[str, float] = {}
    for part in (part for part in makers if part in arguments.parts):
        torch.manual_seed(0)
        model, sizes = makers[part](), (arguments.steps, arguments.batch, arguments.most_images)
        losses[part] = round(train(model, *sizes, sees=part == "target", device=arguments.device), 4)
        save(model, folders[part])
    found = measure(folders["target"], folders["draft"], arguments.scenes) if "measure" in arguments.parts else {}
    print(json.dumps({"steps": arguments.steps, "losses": losses, **found}))


if __name__ == "__main__":
    main()
