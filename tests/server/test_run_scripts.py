"""The scripts of long runs: what they conclude from what they saw. The runs themselves take minutes and are not made here."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
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
        blocks = [{"tokens": 100, "cpu_s": spent, "texts": [text]} for spent in seconds]
        return script.Seen({"home": 3.0, "before": 2.0, "after": after}, blocks)

    told = script.compared(seen((1.0, 1.0)), seen((1.0, 0.8)), seen((1.25, 0.75), after=2.6))
    assert told["recovered"] == pytest.approx(0.6) and told["goodput"] == pytest.approx(1.0) and told["equal_texts"]
    assert told["goodput_by_block"] == pytest.approx([0.8, 4 / 3]) and told["so_far"] == pytest.approx([0.8, 1.0])
    assert told["same"] == pytest.approx(10 / 9) and told["same_by_block"] == pytest.approx([1.0, 1.25])
    quiet = seen((1.0, 1.0))
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


def test_the_server_warms_up_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest first, and not at all with a memory budget, where no round is captured."""
    from outrider import LLM
    from outrider.cli.serve import _warm_up

    asked, llm = list[int](), LLM(method="plain")

    def prepare(method: Any, *, batch_size: int) -> Iterator[tuple[int, int]]:
        assert method is llm.method
        asked.append(batch_size)
        yield 1, 1

    monkeypatch.setattr(llm.rounds, "prepare", prepare)
    given = argparse.Namespace(warm_up=True, memory_budget=None, max_rows=12)
    _warm_up(llm, given)
    assert asked == [16, 8, 4, 2, 1]
    _warm_up(llm, argparse.Namespace(**{**vars(given), "memory_budget": 10**6}))
    _warm_up(llm, argparse.Namespace(**{**vars(given), "warm_up": False}))
    assert len(asked) == 5
