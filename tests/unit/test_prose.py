"""The check of the documents' prose: what it finds, what it leaves alone, and that every page passes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


prose = _load()


def messages(text: str) -> list[str]:
    return [str(finding) for finding in prose.check_text(text, "page.md")]


def test_a_long_sentence_is_found_with_its_line() -> None:
    text = "# Title\n\nA short one. It " + "is " * 30 + "\n"
    (found,) = messages(text)
    assert found.startswith("page.md:3: a sentence of 31 words")


def test_thirty_words_are_allowed() -> None:
    assert not messages("is " * 29 + "it.")


def test_a_sentence_may_begin_with_code() -> None:
    assert not messages("is " * 20 + "it.\n`code` " + "is " * 20 + "it.")


def test_list_items_are_apart() -> None:
    assert not messages("- " + "is " * 20 + "\n- " + "is " * 20 + "\n1. " + "is " * 20)


def test_a_long_line_is_found() -> None:
    (found,) = messages("fine\n" + "x" * 121 + "\n")
    assert found == "page.md:2: a line of 121 characters; wrap it at 120"


def test_banned_words_are_found_as_words() -> None:
    (found,) = messages("It Simply works.")
    assert "'simply'; leave it out" in found
    assert not messages("Leveraged and oversimply are other words.")


@pytest.mark.parametrize("text", ["```\n{}\n```", "    {}", "| {} |", "# {}", "![{}](a.svg)"])
def test_code_tables_headings_and_pictures_are_no_prose(text: str) -> None:
    assert not messages(text.format("simply " * 40))


def test_code_ends_where_its_fence_does() -> None:
    assert len(messages("```\nsimply\n```\nIt is simply so.")) == 1


def test_a_file_of_a_journey_must_exist(tmp_path: Path) -> None:
    (tmp_path / "src" / "outrider").mkdir(parents=True)
    (tmp_path / "src" / "outrider" / "here.py").touch()
    text = "1. `here.py`: fine\n2. `gone.py`: moved\n3. `tests/gone.py`: moved\n"
    found = prose.check_journeys(text, "CONTRIBUTING.md", tmp_path)
    assert [finding.line for finding in found] == [2, 3]
    assert "gone.py does not exist" in found[0].message


def test_every_page_passes() -> None:
    pages = prose.documents(ROOT)
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "index.md", "lossless.md"} <= {page.name for page in pages}
    assert not [str(finding) for finding in prose.check_files(pages)]
