"""Quality against acceptance of the rules of continuous tokens: tokens per pass, CNN-FID, and the law of a token.

Each rule writes images of all classes. CNN-FID is the Frechet distance of features of a small classifier that is trained here
on real digits of 8 pixels. It is no Inception FID, and compares rules only with each other. The distance of "plain" and "plain,
other seeds" is its noise floor. The KS distance of a token's law is read from the results of ``images_continuous_law.py``.
``images_plot.py`` draws both against tokens per pass. The last line of the output is JSON.

    python benchmarks/images_continuous_quality.py --model build/images/continuous --data mnist.npz
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from continuous_ways import WINDOW, pair
from images import Classifier, frechet, trained_classifier
from images_continuous_law import ALL
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.images.continuous.decode import ContinuousSettings, PathWriter
from outrider.images.continuous.imagine import ContinuousImages

LAW = Path(__file__).parent / "results" / "images_continuous_law.json"
LABELS = {"plain": "two target runs", "draft alone": "draft alone"}
"""Ways without a rule, by their name in the results of the law."""


def digits(data: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Real images [N, 8, 8, 1] as the recipe makes them, and their classes."""
    with np.load(data) as file:
        pictures, labels = (torch.from_numpy(file[f"{split}_{what}"][:count]) for what in ("images", "labels"))
    return F.avg_pool2d(F.pad(pictures[:, None].float() / 255, (2, 2, 2, 2)), 4)[:, 0, :, :, None], labels.long()


def ways(folder: Path, num_steps: int) -> dict[str, tuple[PathWriter, int]]:
    """A writer of each row, and a seed: plain decoding twice, the draft alone, and every rule."""
    target, draft = pair(folder, num_steps)
    rules = {name: (PathWriter(target, draft, rule, ContinuousSettings(WINDOW)), 1) for name, rule in ALL.items()}
    return {
        "plain": (PathWriter(target), 1),
        "plain, other seeds": (PathWriter(target), 2),
        "draft alone": (PathWriter(draft), 1),
        **rules,
    }


def with_law(rows: Sequence[dict[str, Any]], law: Path) -> list[dict[str, Any]]:
    """Rows with the KS distance of a token's law, as far as it was measured."""
    laws = {row["rule"]: row["ks_mean"] for row in json.loads(law.read_text())["rows"]} if law.is_file() else {}
    return [{**row, "ks_mean": laws.get(LABELS.get(row["method"], row["method"]), "")} for row in rows]


@torch.no_grad()
def measured(folder: Path, judge: Classifier, real: Tensor, *, num_steps: int, num_images: int) -> Iterator[dict[str, Any]]:
    """A row per way."""
    images, labels = ContinuousImages.load(folder), torch.arange(num_images) % 10
    for name, (writer, seed) in ways(folder, num_steps).items():
        found = writer.write(labels, torch.Generator().manual_seed(seed))
        pixels, stats = images.pixels(found.tokens), [row.stats for row in found.rows]
        passes = sum(one.num_passes for one in stats) / len(stats)
        yield {
            "method": name,
            "window": WINDOW if name in ALL else 0,
            "lossless": ALL[name].lossless or name == "published, temperature 1" if name in ALL else name != "draft alone",
            "passes": round(passes, 2),
            "tokens_per_pass": round(writer.engine.target.num_tokens / passes, 3),
            "kept": round(sum(one.num_accepted for one in stats) / max(sum(one.num_tested for one in stats), 1), 4),
            "cnn_fid": round(frechet(judge.features(pixels), real), 3),
            "class_is_right": round(float((judge(pixels).argmax(-1) == labels).float().mean()), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz, which the models learned from")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--law", type=Path, default=LAW, help="results of images_continuous_law.py")
    parser.add_argument("--note", default="", help="what else the results should say of the models")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    judge = trained_classifier(*digits(arguments.data, "train", 12_000))
    with torch.no_grad():
        real = judge.features(digits(arguments.data, "test", 5000)[0])
    rows, document = list[dict[str, Any]](), dict[str, Any]()
    what = f"quality against acceptance of continuous tokens, {arguments.images} images, T = {arguments.steps}{arguments.note}"
    for row in measured(arguments.model, judge, real, num_steps=arguments.steps, num_images=arguments.images):
        print(row, flush=True)
        rows.append(row)
        found = with_law(rows, arguments.law)
        document = keep_results(arguments.out, what, found, script="benchmarks/images_continuous_quality.py")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
