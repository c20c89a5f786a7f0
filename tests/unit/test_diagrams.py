"""The diagrams of the documentation: what they show is right, and the files are those that the script writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["round", "tree-mask", "acceptance-walk", "coupled-noise", "scheduler", "policy"]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


diagrams, plots = _load("diagrams"), _load("plots")
method_pictures = _load("method_pictures")


def test_every_diagram_is_listed() -> None:
    assert list(diagrams.DIAGRAMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_script_writes(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == diagrams.DIAGRAMS[name]().svg(), "run `python scripts/diagrams.py`"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_xml_with_a_title_and_both_settings(name: str) -> None:
    text = diagrams.DIAGRAMS[name]().svg()
    names = [child.tag.split("}")[1] for child in ElementTree.fromstring(text)]
    assert names[:2] == ["title", "style"]
    assert diagrams.LIGHT["page"] in text and diagrams.DARK["page"] in text


def test_a_node_sees_its_own_path() -> None:
    example = diagrams.Example()
    assert example.ancestors(6) == [0, 1, 3, 6]
    assert example.ancestors(5) == [0, 2, 5]


def test_the_walk_follows_the_targets_choices() -> None:
    example = diagrams.Example()
    assert example.accepted() == [0, 1, 3]
    assert example.choices[3] not in [example.tokens[n] for n, parent in enumerate(example.parents) if parent == 3]


def test_coupled_choices_agree_and_are_not_the_likeliest() -> None:
    text = diagrams.coupled_noise().svg()
    assert "Both choose “hid”" in text and "The likeliest token is “ran”" in text


def test_the_policy_stops_where_more_guesses_cost_more_than_they_bring() -> None:
    easy = diagrams.policy_rates([0.8 ** (depth + 1) for depth in range(8)], draft=0.12, node=0.05)
    hard = diagrams.policy_rates([0.15 ** (depth + 1) for depth in range(8)], draft=0.12, node=0.05)
    assert easy[0] == hard[0] == 1.0 and 0 < easy.index(max(easy)) < 8 and hard.index(max(hard)) == 0


@pytest.mark.parametrize("name", list(plots.PLOTS))
def test_a_plot_is_what_the_script_draws_from_the_results(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == plots.PLOTS[name]().svg(), "run `python scripts/plots.py`"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "machine", "date", "commit", "what", "rows"} <= set(found)


PICTURES = ROOT / "docs" / "images" / "methods"


def test_every_method_has_a_picture_on_its_page() -> None:
    from outrider.methods import METHODS

    drawn = method_pictures.pictures()
    assert set(drawn) == set(METHODS) == {path.stem for path in PICTURES.glob("*.svg")}
    for name, picture in drawn.items():
        text = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert text == picture.svg(), "run `python scripts/method_pictures.py`"
        assert f"](../images/methods/{name}.svg)" in (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")


def test_a_picture_has_the_shape_of_its_method_and_words_that_fit() -> None:
    """A tree is drawn only where the drafter grows trees, and no line is wider than its box."""
    from outrider.core.draft import Shape
    from outrider.methods import METHODS

    for name, row in METHODS.items():
        method = method_pictures.guessing_of((ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8"))
        is_chain = not method.others and all(size == 1 for size in method.levels)
        assert is_chain or row.drafter.shape is Shape.TREE, f"{name} drafts chains"
        assert max(len(method.reads), len(method.drafter)) <= 28, name
        above = [1, *method.levels]
        parents = method_pictures.parents_of(method.levels, uneven=method.uneven)
        assert all(0 <= parent < size for level, size in zip(parents, above) for parent in level), name
