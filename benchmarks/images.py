"""Quality against acceptance of every rule on image models: passes per image, one-step loss, CNN-FID and classifier accuracy.

Each rule draws images of all classes with speculative Jacobi decoding, and with the draft model where one is given. The
one-step loss is measured in closed form on the laws of target and draft along images of the target. CNN-FID is the Frechet
distance of features of a small classifier that is trained here on the real images: it is no Inception FID, and compares rules
only with each other. "plain" against "plain, other seeds" is its noise floor. The last line of the output is JSON.

    python benchmarks/images.py --model build/images/mnist/target --draft build/images/mnist/draft --data mnist.npz
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import __version__
from outrider.acceptance.distance import measure
from outrider.acceptance.lossy import LossyRule
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.images.model import ImageModel, Picture


@dataclass(frozen=True)
class Way:
    """A method with its rule, by name."""

    method: str
    acceptance: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    shuffled: bool = False
    """Neighbours are random codes instead of near ones."""

    @property
    def label(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        rule = " + ".join(filter(None, (self.method, self.acceptance)))
        return f"{rule} ({options}{', random neighbours' if self.shuffled else ''})" if options else rule

    def compose(self, model: ImageModel, window: int) -> Method:
        options = {**dict(self.options), **({} if self.method == "plain" else {"num_draft_tokens": window})}
        if self.shuffled:
            book = model.codebook.embeddings(model.target.vocab_size)
            order = torch.randperm(model.codebook.num_codes, generator=torch.Generator().manual_seed(0))
            options["codebook"] = torch.cat([book[: len(order)][order], book[len(order) :]])
        return model.compose(self.method, acceptance=self.acceptance, options=options)


RELAXED = (
    Way("sjd", "lantern", (("num_neighbours", 10), ("lantern_delta", 0.05))),
    Way("sjd", "lantern", (("num_neighbours", 50), ("lantern_delta", 0.2))),
    Way("sjd", "lantern", (("num_neighbours", 50), ("lantern_delta", 0.2)), shuffled=True),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 2.0))),
    Way("sjd", "lantern++", (("num_neighbours", 50), ("lantern_lambda", 5.0))),
    Way("sjd", "gsd", (("group_size", 14),)),
    Way("sjd", "gsd", (("group_size", 50),)),
    Way("sjd", "gsd-partition", (("num_groups", 128),)),
    Way("sjd", "gsd-partition", (("num_groups", 32),)),
    Way("sjd", "lenient", (("lenience", 0.5),)),
)
EXACT = (
    Way("sjd"),
    Way("sjd", None, (("fill", "uniform"),)),
    Way("sjd", None, (("fill", "point"),)),
    Way("sjd-coupled"),
    Way("jacobi"),
)


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
    model = Classifier(images.shape[3], images.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(images), (128,))
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
    """What was measured of one way."""

    label: str
    window: int
    lossless: bool
    passes: float
    passes_error: float
    fewer: float
    """Codes per pass."""
    kept: float
    """Share of tested guesses that were kept."""
    fid: float
    accuracy: float
    seconds: float
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
        began = time.perf_counter()
        params = model.params(seed=self.seed if seed is None else seed)
        pictures = model.imagine(self.labels, method, params, max_batch_size=50)
        seconds = time.perf_counter() - began
        loss = _loss(model, method)
        return Row(label or way.label, window, method.lossless, seconds=seconds, **self._quality(pictures), **loss)

    def _quality(self, pictures: Sequence[Picture]) -> dict[str, float]:
        pixels = torch.stack([one.pixels for one in pictures])
        passes = torch.tensor([float(one.stats.num_passes) for one in pictures])
        tested = sum(one.stats.num_tested for one in pictures)
        said = self.classifier(pixels).argmax(-1)
        return {
            "passes": float(passes.mean()),
            "passes_error": float(passes.std() / len(passes) ** 0.5),
            "fewer": len(pictures[0].tokens) / float(passes.mean()),
            "kept": sum(one.stats.num_accepted for one in pictures) / max(tested, 1),
            "fid": frechet(self.classifier.features(pixels), self.real),
            "accuracy": float((said == torch.tensor(self.labels)).float().mean()),
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


def read_images(path: Path, count: int) -> tuple[Tensor, Tensor]:
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["train_images"][:count]), torch.from_numpy(file["train_labels"][:count])
    images = images[..., None] if images.ndim == 3 else images
    return images.float() / 255, labels.long()


def judge_of(model: ImageModel, data: Path, *, num_images: int, seed: int) -> Judge:
    images, labels = read_images(data, 12_000)
    classifier = trained_classifier(images[:10_000], labels[:10_000])
    with torch.no_grad():
        real = classifier.features(model.codebook.decode(model.codebook.encode(images[10_000:])))
    return Judge(classifier, real, [i % model.num_classes for i in range(num_images)], seed)


def rows_of(model: ImageModel, judge: Judge, windows: Sequence[int]) -> list[Row]:
    """Plain decoding twice, then everything else."""
    rows = [judge.row(model, Way("plain"), window=0)]
    rows.append(judge.row(model, Way("plain"), window=0, seed=judge.seed + 10**6, label="plain, other seeds"))
    _show(rows[0])
    _show(rows[1])
    drafted = [] if model.draft is None else [Way("draft-model", "rejection"), Way("draft-model", "lantern++")]
    for window in windows:
        for way in EXACT:
            rows.append(judge.row(model, way, window=window))
            _show(rows[-1])
    for way in (*RELAXED, *drafted):
        rows.append(judge.row(model, way, window=windows[-1] if way.method == "sjd" else 5))
        _show(rows[-1])
    return rows


def _show(row: Row) -> None:
    law = "lossless" if row.lossless else f"TV {row.tv_mean:.3f} (max {row.tv_max:.2f})"
    figures = f"{row.passes:6.2f} +- {row.passes_error:.2f} passes {row.fewer:5.2f}x   kept {row.kept:.3f}"
    print(f"{row.label:<66} W {row.window:<3}{figures}   CNN-FID {row.fid:6.2f}   class {row.accuracy:.3f}   {law}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the .npz file the model was made from")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--windows", default="4,8,16")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ImageModel.load(arguments.model, draft=arguments.draft, guidance=arguments.guidance)
    judge = judge_of(model, arguments.data, num_images=arguments.images, seed=arguments.seed)
    rows = rows_of(model, judge, [int(word) for word in arguments.windows.split(",")])
    provenance = {"outrider": __version__, "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({**provenance, "guidance": arguments.guidance, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
