"""Images as tokens: codebooks, guidance in the engine, pictures, and the command that draws them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tiers import in_turn

from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import ModelError, OptionError, RequestError
from outrider.core.interfaces import Target
from outrider.core.request import Origin
from outrider.core.tree import TokenTree
from outrider.images.codebook import Codebook, fit_codebook
from outrider.images.drawing import drawn, growing, passes_of_rows
from outrider.images.guidance import Guided
from outrider.images.model import ImageModel
from outrider.images.png import png_bytes
from outrider.models.random_decoder import tiny_config, tiny_decoder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import images as recipe

ROOT = Path(__file__).parents[2]
NUM_CODES, NUM_CLASSES, NOTHING = 12, 3, 15


def small_codebook() -> Codebook:
    return Codebook(torch.rand(NUM_CODES, 4, generator=torch.Generator().manual_seed(0)), side=8, patch=2, channels=1)


def small_decoder(noise: float = 0.0) -> Target:
    return tiny_decoder(replace(tiny_config(), vocab_size=NOTHING + 1), noise=noise)


def small_model(guidance: float = 1.0) -> ImageModel:
    return ImageModel(small_decoder(), small_codebook(), num_classes=NUM_CLASSES, guidance=guidance, draft=small_decoder(0.2))


# --- codebooks --------------------------------------------------------------------------------------------------------


def test_a_codebook_returns_what_it_was_given() -> None:
    """Images made of codes are encoded as those codes, and decoded pixel for pixel."""
    book = small_codebook()
    tokens = torch.randint(NUM_CODES, (5, 16), generator=torch.Generator().manual_seed(1))
    images = book.decode(tokens)
    assert images.shape == (5, 8, 8, 1) and torch.equal(book.encode(images), tokens)
    assert torch.equal(images[2, 2:4, 4:6, 0].flatten(), book.codes[tokens[2, 6]])


def test_k_means_finds_the_patches_that_are_there() -> None:
    codes = torch.tensor([[0.0] * 4, [0.0, 1.0, 0.0, 1.0], [1.0] * 4])
    images = Codebook(codes, 8, 2, 1).decode(torch.randint(3, (20, 16), generator=torch.Generator().manual_seed(2)))
    found = fit_codebook(images, 3, patch=2)
    torch.testing.assert_close(found.codes, codes)
    with pytest.raises(OptionError, match="more than the 3 different patches"):
        fit_codebook(images, 4, patch=2)
    with pytest.raises(OptionError, match="does not divide"):
        fit_codebook(images, 2, patch=3)


def test_a_codebook_in_a_file(tmp_path: Path) -> None:
    small_codebook().save(tmp_path)
    assert torch.equal(Codebook.load(tmp_path).codes, small_codebook().codes)
    (tmp_path / "codebook.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="make the model again"):
        Codebook.load(tmp_path)
    with pytest.raises(ModelError, match="no image model"):
        Codebook.load(tmp_path / "elsewhere")


# --- guidance ---------------------------------------------------------------------------------------------------------


def test_guided_logits_are_the_mixture_on_trees_too() -> None:
    """Node by node, against two passes of the model itself."""
    model, scale = small_decoder(), 2.5
    guided = Guided(model, scale=scale, classes=range(NUM_CODES, NOTHING), nothing=NOTHING)
    tree = TokenTree.of_rows([([12, 3, 4, 5, 6], [-1, 0, 0, 1, 2]), ([13, 7, 8], [-1, 0, 1])])
    hidden = TokenTree(torch.where(tree.tokens >= NUM_CODES, NOTHING, tree.tokens), tree.parents, tree.sizes)
    found = guided.score(tree, guided.new_cache(2)).logits
    known, unknown = (model.score(one, model.new_cache(2)).logits for one in (tree, hidden))
    valid = tree.valid
    torch.testing.assert_close(found[valid], (unknown + scale * (known - unknown))[valid], atol=1e-4, rtol=1e-4)


TEMPERATURES = {"jacobi": 1.0, "draft-model": 1.0, "sjd": 0.0, "best-first": 0.9}


@pytest.mark.parametrize(("name", "guidance"), in_turn(TEMPERATURES, (3.0, 1.0, 0.0)))
def test_guided_images_are_those_of_plain_decoding(name: str, guidance: float) -> None:
    """Alone and in batches that requests join while others run."""
    temperature = TEMPERATURES[name]
    model = small_model(guidance)
    labels, params = [0, 1, 2, 1, 0], model.params(temperature=temperature, seed=5)
    expected = [one.tokens for one in model.imagine(labels, model.compose("plain"), params, max_batch_size=1)]
    assert max(max(tokens) for tokens in expected) < NUM_CODES
    for batch in (1, 3):
        found = model.imagine(labels, model.compose(name), params, max_batch_size=batch)
        assert [one.tokens for one in found] == expected


def test_a_scale_below_zero_is_refused() -> None:
    with pytest.raises(OptionError, match="guidance = -1"):
        small_model(-1)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_picture_knows_how_it_was_made() -> None:
    model = small_model()
    (picture,) = model.imagine([2], model.compose("sjd", options={"num_draft_tokens": 4}), model.params(seed=1))
    assert len(picture.tokens) == len(picture.rounds) == len(picture.origins) == 16
    assert picture.rounds == sorted(picture.rounds) and picture.rounds[-1] == picture.stats.num_passes - 1
    assert picture.origins.count(Origin.ACCEPTED) == picture.stats.num_accepted
    assert torch.equal(picture.pixels, model.codebook.decode(torch.tensor([picture.tokens]))[0])
    sheet = drawn(picture, size=64)
    assert sheet.shape[2] == 3 and sheet.shape[0] == 64 + 16 and 0 <= float(sheet.min()) <= float(sheet.max()) <= 1
    strip = growing(picture, model.codebook, num_frames=3, size=40)
    assert torch.equal(strip[:, -48:-8], picture.pixels.repeat_interleave(5, 0).repeat_interleave(5, 1).expand(-1, -1, 3))


def test_passes_of_rows() -> None:
    assert passes_of_rows([0, 0, 1, 1, 2, 3, 3, 3, 3], 3) == [2, 3, 1]


def test_a_png_file_can_be_read_back() -> None:
    """The pixels come out of the compressed chunk as they went in."""
    pixels = torch.rand(3, 5, 3, generator=torch.Generator().manual_seed(0))
    data = png_bytes(pixels)
    assert data.startswith(b"\x89PNG") and data[16:24] == (5).to_bytes(4, "big") + (3).to_bytes(4, "big")
    start = data.index(b"IDAT")
    size = int.from_bytes(data[start - 4 : start], "big")
    raw = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + size]), np.uint8).reshape(3, 16)
    assert not raw[:, 0].any() and np.array_equal(raw[:, 1:], (pixels * 255).round().byte().reshape(3, 15).numpy())


# --- the recipe and the command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair made by the recipe, at toy scale, from noise."""
    out = tmp_path_factory.mktemp("images")
    chance = np.random.default_rng(0)
    arrays = {f"{split}_images": chance.integers(0, 256, (60, 8, 8), dtype=np.uint8) for split in ("train", "test")}
    labels = {f"{split}_labels": (np.arange(60) % 3).astype(np.uint8) for split in ("train", "test")}
    np.savez(out / "noise.npz", allow_pickle=False, **arrays, **labels)
    small = recipe.PRESETS["smoke"]
    report = recipe.tokenise(out / "noise.npz", out, small) | recipe.make(out, small, torch.device("cpu"))
    assert report["target_nats"] < 5 and report["codes_used"] == 16
    return out


def test_mirrored_images_are_learned_beside_the_others(folder: Path) -> None:
    tokens = recipe.Tokens.load(folder / "train.npy")
    both, book = tokens.mirrored(), tokens.codebook
    one, other = both.rows.chunk(2)
    assert torch.equal(one, tokens.rows) and torch.equal(other[:, 0], one[:, 0])
    assert torch.equal(other[:, 1:], book.encode(book.decode(one[:, 1:]).flip(2))) and not torch.equal(one, other)


def test_the_recipes_models_draw(folder: Path) -> None:
    model = ImageModel.load(folder / "target", draft=folder / "draft", guidance=1.5, device="cpu")
    assert (model.num_classes, model.codebook.num_tokens) == (3, 4)
    (picture,) = model.imagine([1], model.compose("draft-model"), model.params(seed=0))
    assert picture.pixels.shape == (8, 8, 1)


def test_heads_are_trained_on_tokens_and_draw_the_plain_images(tmp_path: Path) -> None:
    """EAGLE heads of the bundled model, with and without guidance: what they guess changes no image."""
    chance, target = np.random.default_rng(0), bundled_path("digits/target")
    rows = np.concatenate([chance.integers(256, 266, (12, 1)), chance.integers(0, 256, (12, 49))], 1)
    np.save(tmp_path / "train.npy", rows.astype(np.uint16))
    words = ["--target", target, "--data", str(tmp_path / "train.npy"), "--out", str(tmp_path), "--held-out", "2"]
    assert main(["train", "eagle3", *words, "-O", "max_steps=2", "-O", "batch_size=4", "--device", "cpu"]) == 0
    for guidance in (1.0, 2.0):
        model = ImageModel.load(target, guidance=guidance, device="cpu")
        heads = model.compose("eagle3", options={"heads": str(tmp_path / "eagle3"), "num_draft_tokens": 2})
        found = [model.imagine([0, 1, 2], method, model.params(seed=3)) for method in (model.compose("plain"), heads)]
        assert [one.tokens for one in found[1]] == [one.tokens for one in found[0]]


@pytest.mark.parametrize("rule", [None, "lantern", "lantern++", "gsd", "gsd-partition"])
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str | None) -> None:
    """A rule's name is a method here, as the papers have it; the page beside the file has every code with its pass."""
    chosen = ["--method", rule] if rule else []
    words = ["imagine", "--model", str(folder / "target"), "--class", "2", "--out", str(tmp_path / "a.png"), "--show", "--json"]
    assert main([*words, *chosen]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert told["images"][0]["tokens"] == 4 and told["images"][0]["lossless"] is (rule is None)
    assert sum(told["images"][0]["passes_of_rows"]) >= told["images"][0]["passes"]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'<script id="drawn" type="application/json">(.*?)</script>', page)
    (grown,) = json.loads(found)["images"]
    assert len(grown["rounds"]) == len(grown["origins"]) == grown["grid"] ** 2 == 4
    assert grown["image"].startswith("data:image/png;base64,") and set(grown["origins"]) <= {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("method", ["sjd", "draft-model"])
def test_the_bundled_model_draws_a_digit(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Its draft model comes with it."""
    assert main(["imagine", "--class", "3", "--method", method, "--out", str(tmp_path / "three.png"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["images"][0]
    assert told["tokens"] == 49 and told["passes"] < 49, "a window of guesses is tested at once"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--class", "10"], "use 0 to 9"),
        (["--model", "TARGET", "--class", "7"], "use 0 to 2"),
        (["--model", "TARGET", "--method", "sjdd"], "did you mean 'sjd'"),
        (["--model", "TARGET", "--method", "gsdd"], "did you mean 'gsd'"),
        (["--model", "TARGET", "--acceptance", "lanterm"], "did you mean 'lantern'"),
        (["--model", "TARGET", "--out", "/nowhere/a.png"], "cannot be written"),
        (["--model", "TARGET", "--out", "a.html"], "a .png file"),
        (["--model", "TARGET", "--method", "gsd", "--acceptance", "lantern"], "is a rule"),
        (["--model", "TARGET", "-O", "fill"], "NAME=VALUE"),
        (["--model", "TARGET", "--num", "0"], "at least 1"),
        (["--model", "."], "config.json"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["imagine", *[word.replace("TARGET", str(folder / "target")) for word in words]]) == 2
    assert said in capsys.readouterr().err


def test_other_models_are_no_image_models(folder: Path) -> None:
    with pytest.raises(ModelError, match="no image model"):
        ImageModel.load(bundled_path("target"))
    with pytest.raises(ModelError, match="make it again"):
        ImageModel(small_decoder(), small_codebook(), num_classes=9)
    with pytest.raises(RequestError, match="class 3 does not exist"):
        small_model().prompt(3)


# --- the benchmark ----------------------------------------------------------------------------------------------------


def _benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_frechet_distance() -> None:
    """0 between equal sets; of a shift its square; of Gaussians with widths 1 and 3 the closed form."""
    points = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    frechet = _benchmark("images").frechet
    assert frechet(points, points) == pytest.approx(0, abs=1e-6)
    assert frechet(points, points + 2) == pytest.approx(12, abs=1e-3)
    assert frechet(points, 3 * points) == pytest.approx(3 * 4, rel=0.1)


def test_the_plot_has_a_point_per_row() -> None:
    row = {"method": "sjd", "window": 4, "lossless": True, "codes_per_pass": 2.0, "tv_mean": 0.0, "cnn_fid": 30.0}
    lossy = {**row, "method": "sjd + lantern (k 1)", "lossless": False, "tv_mean": 0.2, "cnn_fid": 60.0}
    text = _benchmark("images_plot").plot([row, lossy])
    assert text.count('r="5"') == 4 + 6 and "lantern (k 1), window 4: 2.00 codes per pass" in text
