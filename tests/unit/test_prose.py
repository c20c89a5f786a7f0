"""The check of the documents' prose: what it finds, what it leaves alone, and that every page passes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))  # it imports its neighbour
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
    assert "more than five" in prose.check_journeys("6. `here.py`: far\n", "CONTRIBUTING.md", tmp_path)[0].message


def test_every_page_passes() -> None:
    pages = prose.documents(ROOT)
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "index.md", "lossless.md"} <= {page.name for page in pages}
    assert not [str(finding) for finding in prose.check_files(pages)]


def test_every_docstring_help_text_and_error_passes() -> None:
    files = prose.code_prose.files(ROOT)
    assert len(files) > 700
    assert not [str(finding) for finding in prose.check_files(files)]


@pytest.mark.parametrize(
    "opening",
    [
        "The same in every slot.",
        "As ``fork``, but final.",
        "Of a row.",
        "What is kept.",
        "... and more.",
        "Also this.",
        "The same.",
    ],
)
def test_a_docstring_stands_alone(opening: str) -> None:
    found = prose.check_code(f'number = 1\n"""{opening}"""\n', "file.py")
    assert [(one.line, "say what it is about" in one.message) for one in found] == [(2, True)]


@pytest.mark.parametrize(
    "text",
    [
        "What a drafter may know of a round.",
        "The same draft length every round.",
        "A row.",
        "Asked of every row.",
        "Often it is 0.",
    ],
)
def test_a_docstring_that_says_its_noun_passes(text: str) -> None:
    assert not prose.check_code(f'"""{text}"""\n', "file.py")


@pytest.mark.parametrize(
    "code",
    [
        '"""{}"""',
        'parser.add_argument("--x", help="{}")',
        'raise OptionError(f"{} {{value}}")',
        'raise OptionError("Fine; {}")',
    ],
)
def test_long_sentences_are_found_in_code(code: str) -> None:
    assert len(prose.check_code(code.format("word " * 31), "file.py")) == 1


def test_formulas_and_commands_in_docstrings_are_no_prose() -> None:
    lines = "word " * 20
    assert not prose.check_code(
        f'"""Title.\n\n    {lines}\n    {lines}\noutrider {lines}\n\na   =   {lines}{lines}\n"""\n', "file.py"
    )


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_first_what_it_is_about(page: Path) -> None:
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    assert title.startswith("# ") and not rest.startswith(("```", "    ", "|", "!", "<!--")), "a sentence comes before code"
