"""Quality against acceptance of every rule on image models: passes per image, one-step loss, CNN-FID and classifier accuracy.

Each rule draws images of all classes with speculative Jacobi decoding, and with the draft model and trained heads where they
are given. The one-step loss is measured in closed form on the laws of target and draft along images of the target. CNN-FID is
the Frechet distance of features of a small classifier that is trained here on the images behind ``--tokens``. It is no
Inception FID, and compares rules only with each other. The distance of "plain" and "plain, other seeds" is its noise floor.

    python benchmarks/images.py --model build/images/mnist/target --draft build/images/mnist/draft --tokens build/images/mnist
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from image_ways import Way, ways_of
from torch import Tensor, nn

from outrider.acceptance.distance import measure
from outrider.acceptance.lossy import LossyRule
from outrider.bench.provenance import keep_results
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.images.model import ImageModel, Picture


class Classifier(nn.Module):
    """Two convolutions and two layers; its 64 features are what images are compared by."""

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3, padding=1, stride=2)
        self.second = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.third = nn.Linear(32 * ((side + 3) // 4) ** 2, 64)
        self.last = nn.Linear(64, num_classes)

    def features(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2)
        return F.relu(self.third(F.relu(self.second(F.relu(self.first(x)))).flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images))


def trained_classifier(images: Tensor, labels: Tensor, *, steps: int = 400) -> Classifier:
    """On real images."""
    torch.manual_seed(0)
    model = Classifier(images.shape[3], images.shape[1], int(labels.max()) + 1).to(images.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(images), (128,)).to(images.device)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def frechet(a: Tensor, b: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) of two sets of features [N, D] (Heusel et al. 2017)."""
    a, b = a.double(), b.double()
    first, second = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(first)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * cross)


@dataclass(frozen=True)
class Row:
    """Measurements of one way."""

    method: str
    window: int
    lossless: bool
    passes: float
    error: float
    """Standard error of the mean number of passes."""
    codes_per_pass: float
    kept: float
    """Share of tested guesses that were kept."""
    cnn_fid: float
    class_is_right: float
    """As the classifier sees it."""
    tv_mean: float = 0.0
    tv_max: float = 0.0


@dataclass(frozen=True, eq=False)
class Judge:
    """What images are compared with."""

    classifier: Classifier
    real: Tensor
    """[N, D] features of real images, after the codebook: what the model could draw at best."""
    labels: list[int]
    seed: int

    @torch.no_grad()
    def row(self, model: ImageModel, way: Way, *, window: int, seed: int | None = None, label: str = "") -> Row:
        method = way.compose(model, window)
        params = model.params(seed=self.seed if seed is None else seed)
        pictures = model.imagine(self.labels, method, params, max_batch_size=100)
        found = {**self._quality(pictures), **_loss(model, method)}
        return Row(label or way.label, window, method.lossless, **{name: round(value, 4) for name, value in found.items()})

    def _quality(self, pictures: Sequence[Picture[int]]) -> dict[str, float]:
        pixels = torch.stack([one.pixels for one in pictures]).to(self.real.device)
        passes = torch.tensor([float(one.stats.num_passes) for one in pictures])
        tested = sum(one.stats.num_tested for one in pictures)
        said = self.classifier(pixels).argmax(-1).cpu()
        return {
            "passes": float(passes.mean()),
            "error": float(passes.std() / len(passes) ** 0.5),
            "codes_per_pass": len(pictures[0].tokens) / float(passes.mean()),
            "kept": sum(one.stats.num_accepted for one in pictures) / max(tested, 1),
            "cnn_fid": frechet(self.classifier.features(pixels), self.real),
            "class_is_right": float((said == torch.tensor(self.labels)).float().mean()),
        }


def _loss(model: ImageModel, method: Method) -> dict[str, float]:
    """One-step loss of a lossy rule with the draft's law as q."""
    if method.lossless or model.draft is None:
        return {}
    p, q = (_laws(model, one) for one in (model.target, model.draft))
    loss = measure(cast(LossyRule, method.rule), p, q)
    return {"tv_mean": float(loss.tv.mean()), "tv_max": float(loss.tv.max())}


def _laws(model: ImageModel, scored: Target, *, count: int = 12) -> Tensor:
    """[M, V] a model's law at every place of images that the target drew."""
    labels = [i % model.num_classes for i in range(count)]
    pictures = model.imagine(labels, model.compose("plain"), model.params(seed=99))
    params = model.params(seed=0)
    rows = [model.prompt(label) + one.tokens[:-1] for label, one in zip(labels, pictures, strict=True)]
    tree = TokenTree.chain(torch.tensor(rows, device=scored.device))
    states = [RequestState.of(Request(row[:1], params)) for row in rows]
    zeros = torch.zeros(len(rows), dtype=torch.int64, device=scored.device)
    logits = scored.score(tree, scored.new_cache(len(rows))).logits.double()
    return Sampler(states, scored.vocab_size, scored.device).law(logits, tree, Noise(zeros, zeros)).probs.flatten(0, 1)


def read_tokens(path: Path, model: ImageModel) -> tuple[Tensor, Tensor]:
    """Pictures as the codebook has them, and their classes, of a file of ``recipes/images.py``; on the model's device."""
    rows = torch.from_numpy(np.load(path)[:12_000].astype(np.int64))
    pictures, labels = model.codebook.decode(rows[:, 1:]), rows[:, 0] - model.codebook.num_codes
    return pictures.to(model.target.device), labels.to(model.target.device)


def judge_of(model: ImageModel, tokens: Path, *, num_images: int, seed: int) -> Judge:
    began = time.monotonic()
    print("training the classifier that judges images ...", flush=True)
    classifier = trained_classifier(*read_tokens(tokens / "train.npy", model))
    images, labels = read_tokens(tokens / "test.npy", model)
    with torch.no_grad():
        real, said = classifier.features(images), classifier(images).argmax(-1)
    right = float((said == labels).float().mean())
    print(f"the classifier names {right:.3f} of the held-out images rightly; {time.monotonic() - began:.0f} s", flush=True)
    return Judge(classifier, real, [i % model.num_classes for i in range(num_images)], seed)


def rows_of(model: ImageModel, judge: Judge, ways: Iterable[tuple[Way, int]]) -> Iterator[Row]:
    """Plain decoding twice, then everything else."""
    yield judge.row(model, Way("plain"), window=0)
    yield judge.row(model, Way("plain"), window=0, seed=judge.seed + 10**6, label="plain, other seeds")
    for way, window in ways:
        yield judge.row(model, way, window=window)


def _show(row: Row) -> None:
    law = "lossless" if row.lossless else f"TV {row.tv_mean:.3f} (max {row.tv_max:.2f})"
    figures = f"{row.passes:6.2f} +- {row.error:.2f} passes {row.codes_per_pass:5.2f}x   kept {row.kept:.3f}"
    quality = f"CNN-FID {row.cnn_fid:6.2f}   class {row.class_is_right:.3f}"
    print(f"{row.method:<66} W {row.window:<3}{figures}   {quality}   {law}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--heads", type=Path, nargs="*", default=[], help="folders that outrider train wrote for the model")
    parser.add_argument("--tokens", type=Path, required=True, help="the folder of tokens that the model was made from")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--windows", default="4,8,16")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="ways whose names hold one of these")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda ... (default: a GPU where there is one)")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    model = ImageModel.load(arguments.model, draft=arguments.draft, guidance=arguments.guidance, device=arguments.device)
    judge = judge_of(model, arguments.tokens, num_images=arguments.images, seed=arguments.seed)
    windows = [int(word) for word in arguments.windows.split(",")]
    ways = ways_of(model, arguments.heads, windows)
    what = f"quality against acceptance, {arguments.images} images of {arguments.model.parent.name}, temperature 1"
    rows, document = list[dict[str, Any]](), dict[str, Any]()
    for row in rows_of(model, judge, [one for one in ways if any(text in one[0].label for text in arguments.only)]):
        _show(row)
        rows.append(asdict(row))  # written after every row: a run that is stopped leaves what it has
        document = keep_results(arguments.out, what, rows, script="benchmarks/images.py")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
