"""Image models from a file of pictures: a codebook of patches, a class-conditional Llama over its codes, and a draft.

An image is its class token and then its codes in raster order. A tenth of the class tokens are replaced by one that says
nothing. So the same model is also the unconditional one that classifier-free guidance needs (Ho & Salimans 2022, arXiv
2207.12598). The file is an ``.npz`` with ``train_images``, ``train_labels``, ``test_images``, ``test_labels`` (uint8).

    python recipes/images.py --data mnist.npz --out build/images/mnist                              # CPU, two minutes
    python recipes/images.py --data cifar10_16px.npz --out build/images/cifar --preset cifar        # GPU, two minutes
    outrider imagine --model build/images/mnist/target --class 3 --method sjd --show
    outrider train eagle3 --target build/images/mnist/target --data build/images/mnist/train.npy --out build/images/mnist

The images become tokens first: ``codebook.safetensors``, ``train.npy`` and ``test.npy`` [N, 1 + T] in the folder. Without
``--data`` the models learn from the tokens that are there, so the images need not be on the machine that trains.
``--tokens-for MODEL`` writes the tokens of a model that exists, for training heads or for the benchmark, and no model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bundled_stories import LlamaShape, rope_tables
from bundled_train import Llama, amp
from torch import Tensor

from outrider.images.codebook import Codebook, fit_codebook
from outrider.models.checkpoint import write_checkpoint


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that defines one pair of image models."""

    num_codes: int = 256
    patch: int = 4
    num_fitted: int = 2000
    """Images whose patches are clustered."""
    num_trained: int = 20_000
    """Images that the models learn from."""
    target: tuple[int, int, int, int] = (64, 4, 2, 160)
    """Width, layers, heads and width of the MLP."""
    draft: tuple[int, int, int, int] = (32, 1, 1, 64)
    batch: int = 64
    target_steps: int = 800
    draft_steps: int = 500
    rate: float = 4e-3
    label_drop: float = 0.1
    mirrored: bool = False
    """The models learn from mirrored images too."""
    seed: int = 0


PRESETS = {
    "mnist": ImageRecipe(),
    "mnist-large": ImageRecipe(
        num_fitted=4000,
        num_trained=60_000,
        target=(192, 6, 6, 512),
        draft=(64, 1, 2, 128),
        batch=512,
        target_steps=4000,
        draft_steps=2000,
        rate=2e-3,
    ),
    "cifar": ImageRecipe(
        num_codes=1024,
        patch=2,
        num_fitted=4000,
        num_trained=30_000,
        target=(256, 6, 8, 704),
        draft=(128, 1, 4, 352),
        batch=256,
        target_steps=2400,
        draft_steps=1600,
        rate=1.5e-3,
        mirrored=True,
    ),
    "smoke": ImageRecipe(
        num_codes=16,
        num_fitted=64,
        num_trained=200,
        target=(32, 1, 2, 32),
        draft=(32, 1, 2, 32),
        batch=8,
        target_steps=3,
        draft_steps=2,
    ),
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """Images as tokens."""

    rows: Tensor
    """[N, 1 + T] the class token, then the codes."""
    codebook: Codebook

    @property
    def nothing(self) -> int:
        """The token of no class."""
        return self.codebook.num_codes + self.num_classes

    @property
    def num_classes(self) -> int:
        return int(self.rows[:, 0].max()) + 1 - self.codebook.num_codes

    @property
    def codes(self) -> Tensor:
        return self.rows[:, 1:]

    def mirrored(self) -> Tokens:
        """These images and their mirror images."""
        codes = self.codebook.encode(self.codebook.decode(self.codes).flip(2))
        return replace(self, rows=torch.cat([self.rows, torch.cat([self.rows[:, :1], codes], 1)]))

    def save(self, path: Path) -> None:
        self.codebook.save(path.parent)
        np.save(path, self.rows.numpy().astype(np.uint16))

    @staticmethod
    def load(path: Path) -> Tokens:
        return Tokens(torch.from_numpy(np.load(path).astype(np.int64)), Codebook.load(path.parent))


def read_images(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """[N, side, side, channels] pictures in 0 .. 1, and their labels."""
    with np.load(path) as file:
        images, labels = (torch.from_numpy(file[f"{split}_{what}"]) for what in ("images", "labels"))
    images = images[..., None] if images.ndim == 3 else images
    return images.float() / 255, labels.long()


def shape_of(sizes: tuple[int, int, int, int], vocab: int, context: int) -> LlamaShape:
    hidden, layers, heads, mlp = sizes
    return LlamaShape(vocab, hidden, layers, heads, heads, hidden // heads, mlp, context, rope_theta=1000.0, norm_eps=1e-5)


def batch_of(tokens: Tokens, rows: Tensor, drop: Tensor) -> Tensor:
    """[B, 1 + T] images; the class is hidden where ``drop`` [B] is true."""
    ids = tokens.rows[rows]
    return torch.cat([torch.where(drop, tokens.nothing, ids[:, 0])[:, None], ids[:, 1:]], 1)


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    cos, sin = rope_tables(model.shape, ids.shape[1] - 1, ids.device)
    with amp(ids.device):
        logits = model(ids[:, :-1], cos, sin)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(model: Llama, tokens: Tokens, recipe: ImageRecipe, *, num_steps: int, name: str) -> float:
    """Adam with a warm-up and a cosine to zero; returns seconds."""
    device = next(model.parameters()).device
    chance = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
    )
    began = time.monotonic()
    for step in range(num_steps):
        rows = torch.randint(len(tokens.rows), (recipe.batch,), generator=chance)
        drop = torch.rand(recipe.batch, generator=chance) < recipe.label_drop
        loss = loss_of(model, batch_of(tokens, rows, drop).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{name}: step {step} of {num_steps}, {loss.item():.3f} nats, {time.monotonic() - began:.0f} s", flush=True)
    return time.monotonic() - began


@torch.no_grad()
def held_out(model: Llama, tokens: Tokens, *, count: int = 1000) -> float:
    """Nats per token of images that were not trained on."""
    parts = tokens.rows[:count].to(next(model.parameters()).device).split(100)
    return sum(float(loss_of(model, part)) for part in parts) / len(parts)


def export(model: Llama, codebook: Codebook, folder: Path, *, num_classes: int, notes: dict[str, object]) -> None:
    """A Llama folder with a codebook beside its weights."""
    own = {"dtype": "bfloat16", "outrider": {"kind": "image", "num_classes": num_classes}}
    config = {**model.shape.config(), **own}
    write_checkpoint(folder, model.weights(), config=config, notes=notes)
    codebook.save(folder)


def tokenise(data: Path, out: Path, recipe: ImageRecipe, codebook: Codebook | None = None) -> dict[str, float]:
    """The images as tokens, of a new codebook where none is given."""
    out.mkdir(parents=True, exist_ok=True)
    images, labels = read_images(data, "train")
    if codebook is None:
        codebook = fit_codebook(images[: recipe.num_fitted], recipe.num_codes, patch=recipe.patch, seed=recipe.seed)
    test_images, test_labels = (part[:2000] for part in read_images(data, "test"))
    parts = {"train": (images[: recipe.num_trained], labels[: recipe.num_trained]), "test": (test_images, test_labels)}
    rows: dict[str, Tensor] = {}
    for name, (pictures, classes) in parts.items():
        rows[name] = torch.cat([codebook.num_codes + classes[:, None], codebook.encode(pictures)], 1)
        Tokens(rows[name], codebook).save(out / f"{name}.npy")
    error = float((codebook.decode(rows["test"][:, 1:]) - test_images).square().mean())
    return {"reconstruction_rmse": error**0.5, "codes_used": float(len(rows["train"][:, 1:].unique()))}


def make(out: Path, recipe: ImageRecipe, device: torch.device) -> dict[str, float]:
    """Target and draft, from the tokens in the folder."""
    torch.manual_seed(recipe.seed)
    tokens, test = (Tokens.load(out / f"{name}.npy") for name in ("train", "test"))
    tokens, report = tokens.mirrored() if recipe.mirrored else tokens, {}
    for name, sizes, steps in (("target", recipe.target, recipe.target_steps), ("draft", recipe.draft, recipe.draft_steps)):
        model = Llama(shape_of(sizes, tokens.nothing + 1, tokens.rows.shape[1]), device)
        report[f"{name}_parameters"] = float(sum(parameter.numel() for parameter in model.parameters()))
        report[f"{name}_seconds"] = train(model, tokens, recipe, num_steps=steps, name=name)
        report[f"{name}_nats"] = held_out(model, test)
        notes = {"recipe": asdict(recipe), "report": report}
        export(model, tokens.codebook, out / name, num_classes=tokens.num_classes, notes=notes)
    return report


def main() -> None:
    """Read the options, make the pair, print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file of images and labels (default: the tokens in the folder)")
    parser.add_argument("--out", type=Path, default=Path("build/images"))
    parser.add_argument(
        "--tokens-for", type=Path, metavar="MODEL", help="write the images as this model's tokens, and no model"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mnist")
    parser.add_argument("--target-steps", type=int, help="steps of the target (default: the preset's)")
    parser.add_argument("--draft-steps", type=int, help="steps of the draft (default: the preset's)")
    arguments = parser.parse_args()
    recipe = PRESETS[arguments.preset]
    recipe = replace(
        recipe,
        target_steps=arguments.target_steps or recipe.target_steps,
        draft_steps=arguments.draft_steps or recipe.draft_steps,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    book = None if arguments.tokens_for is None else Codebook.load(arguments.tokens_for)
    report = tokenise(arguments.data, arguments.out, recipe, book) if arguments.data else {}
    print(json.dumps(report | ({} if book else make(arguments.out, recipe, device))))


if __name__ == "__main__":
    main()
