"""Generated pages: methods, rules and policies link where there is a page; the API, the commands and the metrics are whole."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import outrider
from outrider.cli.main import COMMANDS
from outrider.methods import METHODS, POLICIES, RULES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import reference

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_tables_is_on_the_page() -> None:
    text = reference.page()
    assert all(f"[{name}](methods/{name}.md)" in text and row.summary in text for name, row in METHODS.items())
    assert all(f"| `{name}` | {row.summary} |" in text for name, row in [*RULES.items(), *POLICIES.items()])


def test_lossy_rules_say_so() -> None:
    lines = reference.page().splitlines()
    for name, row in RULES.items():
        (line,) = [line for line in lines if line.startswith(f"| `{name}` | {row.summary} |") and line.count("|") == 5]
        assert ("| yes |" in line) == row.rule.lossless


def test_a_page_of_ours_becomes_a_link_and_a_paper_stays() -> None:
    assert reference.source("docs/lossy.md") == "[lossy](lossy.md)"
    assert reference.source("arXiv 2211.17192") == "arXiv 2211.17192"


def test_a_cell_cannot_end_its_column() -> None:
    assert reference.table(["a"], [("x | y",)]) == "| a |\n| --- |\n| x   y |\n"


def test_the_pages_are_up_to_date() -> None:
    assert not reference.stale(), "run `python scripts/reference.py`"


def test_every_public_name_is_on_the_page_of_the_api_with_its_words() -> None:
    text = reference.reference_api.page()
    headings = re.findall(r"^## `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(outrider.__all__)
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        words = re.sub(r"```text.*?```", "", part.partition("\n")[2], flags=re.DOTALL)
        assert words.strip(), f"{part.partition(chr(10))[0]} has no docstring"
    assert "|  |" not in text, "a public field has no docstring"


def test_a_long_signature_has_a_line_for_each_parameter() -> None:
    (made,) = [node for node in reference.reference_api.definition("LLM").body if getattr(node, "name", "") == "__init__"]
    lines = reference.reference_api.signature(made, "LLM").splitlines()
    names = [name for name in inspect.signature(outrider.LLM).parameters if name != "options"]
    assert all(any(line.startswith(f"    {name}: ") for line in lines) for name in names)


def test_every_option_of_every_command_is_on_its_page() -> None:
    text = reference.reference_commands.page()
    for name in COMMANDS:
        section = text.partition(f"## `outrider {name}`\n")[2].partition("\n## ")[0]
        for action in reference.reference_commands.parser_of(name)._actions:
            for option in set(action.option_strings) - {"-h", "--help"}:
                assert f"`{option}`" in section, f"{option} of {name} is missing"


def test_every_metric_is_on_its_page() -> None:
    text = reference.reference_metrics.page()
    source = (ROOT / "src" / "outrider" / "server" / "metrics.py").read_text()
    for name in re.findall(r"(?:counter|gauge|histogram)\(\"(\w+)\"", source):
        assert f"| `outrider:{name}` |" in text
