"""Images by continuous tokens at the command line and from Python, with a tiny random pair as the recipe leaves it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import CompositionError, ModelError, OptionError, RequestError
from outrider.core.request import Origin
from outrider.images.continuous.imagine import ContinuousImages, is_continuous, way_of
from outrider.images.continuous.model import ContinuousShape, Network, save_network
from outrider.images.drawing import drawn

SHAPE = ContinuousShape(num_tokens=9, dim=4, num_classes=3, width=16, num_layers=1, num_heads=2, head_width=16, head_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("continuous")
    torch.manual_seed(0)
    network = Network(SHAPE)
    save_network(network, out / "target", {})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_network(network, out / "draft", {})
    return out


@pytest.mark.parametrize("rule", ["joint-path", "reflect", "last-step", "published", "plain"])
def test_the_command_draws_continuous_tokens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    """The file, the page with every token's pass and origin, and what is said of the law."""
    words = ["imagine", "--model", str(folder), "--class", "2", "--method", rule, "-O", "num_steps=4"]
    assert main([*words, "--out", str(tmp_path / "a.png"), "--show", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["images"][0]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert told["tokens"] == 9 and told["lossless"] is (rule != "published") and told["seconds"] > 0
    assert len(told["passes_of_rows"]) == 3 and (told["passes"] == 9) is (rule == "plain")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'<script id="drawn" type="application/json">(.*?)</script>', page)
    (grown,) = json.loads(found)["images"]
    assert len(grown["rounds"]) == len(grown["origins"]) == grown["grid"] ** 2 == 9
    assert grown["origins"].count("accepted") == told["accepted"]
    assert ("lossless" in page) is (rule != "published")


def test_the_command_says_what_it_did(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two images with the pair named one by one; the lossy rule is labelled."""
    pair = ["--model", str(folder / "target"), "--draft", str(folder / "draft")]
    words = ["imagine", *pair, "--method", "published", "-n", "2", "--out", str(tmp_path / "a.png")]
    assert main([*words, "-O", "num_steps=3", "--window", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all("9 tokens in" in line and "LOSSY" in line for line in said[:2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "sjd"], "unknown rule of continuous tokens 'sjd'"),
        (["--method", "reflekt"], "did you mean 'reflect'"),
        (["--class", "3"], "use 0 to 2"),
        (["--acceptance", "reflect"], "name the rule with --method"),
        (["--guidance", "2"], "--guidance is for models of codes"),
        (["--temperature", "0"], "--temperature is for models of codes"),
        (["--top-k", "5"], "--top-k is for models of codes"),
        (["--device", "cuda"], "it runs on the CPU"),
        (["--window", "0"], "window from 1 on"),
        (["--method", "reflect", "-O", "eta=0.5"], "rule 'reflect' has no option 'eta'"),
        (["-O", "etta=0.5"], "did you mean 'eta'"),
        (["-O", "eta=high"], "use a number"),
        (["-O", "num_steps=0"], "at least one step"),
        (["-O", "num_steps=2.5"], "use a whole number"),
        (["-O", "eta=true"], "use a number"),
        (["--method", "last-step", "-O", "shared=3"], "use true or false"),
        (["-O", "prefill=2"], "a share from 0 to 1"),
        (["--seed", "-1"], "use 0 or more"),
    ],
)
def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    fixed = ["imagine", "--model", str(folder), "--out", str(tmp_path / "a.png")]
    assert main([*fixed, *words]) == 2
    assert said in capsys.readouterr().err


def test_rules_of_the_other_kind_are_told_apart(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule of continuous tokens on codes, and a pair without its draft."""
    out = ["--out", str(tmp_path / "a.png")]
    assert main(["imagine", "--method", "joint-path", "--model", bundled_path("digits/target"), *out]) == 2
    assert "is a rule of continuous tokens" in capsys.readouterr().err
    assert main(["imagine", "--model", str(folder / "target"), *out]) == 2
    assert "needs a draft model" in capsys.readouterr().err
    assert main(["imagine", "--model", str(folder / "target"), "--draft", bundled_path("digits/draft"), *out]) == 2
    assert "holds no continuous image model" in capsys.readouterr().err


def test_images_from_python(folder: Path) -> None:
    """The same seed draws the same image, and the file's parts belong together."""
    images, way = ContinuousImages.load(folder), way_of("reflect", {"num_steps": 4, "window": 3})
    first, second = images.imagine([1, 1], way, seed=5)
    (again,) = images.imagine([1], way, seed=6)
    assert second.tokens == again.tokens != first.tokens
    assert first.pixels.shape == (6, 6, 1) and torch.equal(first.pixels, images.pixels(torch.tensor(first.tokens)))
    assert first.origins.count(Origin.ACCEPTED) == first.stats.num_accepted and len(first.rounds) == 9
    assert drawn(first, size=60).shape[0] == 60 + 16
    assert way.lossless and not way_of("published").lossless and way_of("plain").lossless


def test_pixels_undo_the_patches_of_the_recipe() -> None:
    """Patches in raster order, each of two rows of two."""
    images = ContinuousImages(Network(ContinuousShape(num_tokens=4, dim=4, width=8, num_layers=1, num_heads=1)))
    tokens = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]).float() / 15
    torch.testing.assert_close(images.pixels(2 * tokens - 1)[..., 0], torch.arange(16.0).view(4, 4) / 15)


def test_refusals(folder: Path) -> None:
    assert is_continuous(folder) and is_continuous(folder / "draft") and not is_continuous(bundled_path("digits/target"))
    with pytest.raises(ModelError, match="do not make a square image"):
        ContinuousImages(Network(ContinuousShape(num_tokens=3, dim=4, width=8, num_layers=1, num_heads=1)))
    with pytest.raises(CompositionError, match="needs a draft model"):
        ContinuousImages.load(folder / "target").imagine([0], way_of("reflect"))
    with pytest.raises(RequestError, match="class 7 does not exist"):
        ContinuousImages.load(folder).imagine([7], way_of("plain"))
    with pytest.raises(OptionError, match="unknown rule"):
        way_of("gsd")
