"""The scripts of long runs: what they conclude from what they saw. The runs themselves take minutes and are not made here."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str((ROOT / path).parent))  # where its siblings are, as when it is run
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_what_learning_brought_back_and_cost() -> None:
    script = load("benchmarks/learn_run.py")

    def seen(seconds: tuple[float, float], after: float = 2.0, text: str = "a") -> Any:
        blocks = [{"parts": [(50, spent / 2)] * 2, "texts": [text], "beside": spent / 10} for spent in seconds]
        return script.Seen({"home": 3.0, "before": 2.0, "after": after}, blocks)

    told = script.compared(seen((1.0, 1.0)), seen((1.0, 0.8)), seen((1.25, 0.75), after=2.6))
    assert told["recovered"] == pytest.approx(0.6) and told["goodput"] == pytest.approx(0.95) and told["equal_texts"]
    assert told["goodput_by_block"] == pytest.approx([0.8, 1.2]) and told["so_far"] == pytest.approx([0.8, 0.95])
    assert told["goodput_interval"][0] <= 0.95 <= told["goodput_interval"][1]
    assert told["same"] == pytest.approx(10 / 9, abs=1e-4) and told["same_by_block"] == pytest.approx([1.0, 1.25])
    assert told["beside_by_block"] == pytest.approx([0.125, 0.075])
    quiet = seen((1.0, 1.0))
    assert script.compared(quiet, quiet, quiet)["recovered"] == 0
    quiet.told["home"] = 1.9
    assert script.compared(quiet, quiet, quiet)["recovered"] is None, "nothing was lost"
    assert not script.compared(quiet, quiet, seen((1.0, 1.0), text="b"))["equal_texts"]


@pytest.mark.parametrize(
    ("seen", "well"),
    [
        ({}, True),
        ({"memory_after": 120}, False),
        ({"memory_after": 120, "in_caches_after": 15}, True),
        ({"memory_before": 110, "memory_after": 115, "in_caches_before": 10}, False),
        ({"slower_than_3_p99": {"a case": 9.0}}, False),
        ({"server_errors": ["a case"]}, False),
        ({"changed_texts": ["a case"]}, False),
        ({"not_in_order": ["a case: 200"]}, False),
    ],
)
def test_what_a_hostile_run_finds_out_of_bounds(seen: dict[str, Any], well: bool) -> None:
    quiet = {
        "in_caches_before": 0,
        "in_caches_after": 0,
        "memory_before": 100,
        "memory_after": 105,
        "slower_than_3_p99": {},
        "server_errors": [],
        "changed_texts": [],
    }
    assert load("scripts/hostile_run.py").is_well({**quiet, "not_in_order": [], **seen}) is well


def test_what_several_processes_found_is_one_result() -> None:
    script = load("scripts/identity_run.py")
    part = {"requests": 3, "equal": 3, "different": 0, "refused": 0, "preempted": 1, "engine_failures": 0}
    told = script.added([{**part, "methods": {"plain": 1, "suffix": 2}}, {**part, "methods": {"suffix": 3}}])
    assert told["requests"] == 6 and told["methods"] == {"plain": 1, "suffix": 5} and script.is_well(told)
    for name in ("different", "refused", "engine_failures"):
        assert not script.is_well({**told, name: 1})
    assert not script.is_well({**told, "preempted": 0})


def test_clients_become_columns_and_features_rows() -> None:
    rows = load("scripts/clients.py").by_feature({"one 1.0": {"text": "yes"}, "two 2.0": {"text": "yes", "tools": "ApiError"}})
    assert rows == [
        {"feature": "text", "one 1.0": "yes", "two 2.0": "yes"},
        {"feature": "tools", "one 1.0": "", "two 2.0": "ApiError"},
    ]


@pytest.mark.parametrize(
    ("wrong", "well"),
    [
        ({}, True),
        ({"score_with_guesses": 0.5}, False),
        ({"same_answers": 9}, False),
        ({"tokens_guessed_with_guesses": 0}, False),
        ({"tokens_guessed": 3}, False),
    ],
)
def test_lm_eval_must_say_the_same_with_guesses(wrong: dict[str, Any], well: bool) -> None:
    row = {"questions": 10, "score": 0.6, "score_with_guesses": 0.6, "same_answers": 10}
    row |= {"tokens_guessed": 0, "tokens_guessed_with_guesses": 5}
    assert load("scripts/lm_eval_check.py").is_well([{**row, **wrong}]) == well


def test_what_a_small_model_cannot_do_may_fail_in_langchains_tests(tmp_path: Path) -> None:
    script, report = load("scripts/langchain_check.py"), tmp_path / "report.xml"
    cases = '<testcase name="test_invoke"/><testcase name="test_pdf"><skipped message="No PDF."/></testcase>'
    failed = '<testcase name="test_tool_choice[a]"><failure message="{}&#10;more"/></testcase>'
    for error, result in (("assert []", "failed by the model"), ("RuntimeError: closed", "failed")):
        report.write_text(f"<testsuites><testsuite>{cases}{failed.format(error)}</testsuite></testsuites>")
        rows = script.rows_of(report)
        assert [(row["test"], row["result"]) for row in rows[:2]] == [("test_invoke", "passed"), ("test_pdf", "skipped")]
        assert rows[2]["result"] == result and (rows[2]["why"] == error) == (result == "failed")
        assert script.is_well(rows) == (result != "failed")
    assert not script.is_well([])


def test_the_server_warms_up_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at all with a memory budget, where no round is captured."""
    from outrider import LLM
    from outrider.cli.serve import _warm_up

    asked, llm = list[int](), LLM(method="plain")

    def prepare(method: Any, sizes: Collection[int]) -> Iterator[tuple[int, int]]:
        assert method is llm.method
        asked.extend(sizes)
        yield 1, 1

    monkeypatch.setattr(llm.rounds, "prepare", prepare)
    given = argparse.Namespace(warm_up=True, memory_budget=None, max_rows=12)
    _warm_up(llm, given)
    assert sorted(asked) == [1, 2, 4, 8, 16]
    _warm_up(llm, argparse.Namespace(**{**vars(given), "memory_budget": 10**6}))
    _warm_up(llm, argparse.Namespace(**{**vars(given), "warm_up": False}))
    assert len(asked) == 5


def test_a_row_of_agents_is_made_of_numbers() -> None:
    script = load("benchmarks/agents.py")
    plain, fast = (
        script.Counted([[seconds, 1.0], [seconds, 1.0]], 40, passes, 10, 5) for seconds, passes in ((3.0, 40), (1.0, 20))
    )
    row = script.row_of("agent", "suffix", fast, plain)
    assert (row["tokens per CPU second"], row["speed to plain"], row["tokens per pass"]) == (10.0, 2.0, 2.0)
    assert (row["accepted of guesses"], row["rounds"], row["other texts"]) == (0.5, 2, 0)
