"""Medians, intervals and comparisons of runs: that the intervals cover, and that a regression of 5 % is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.bench.compare import changes_table, compare, compare_runs
from outrider.bench.curves import PassCurve
from outrider.bench.stats import Estimate, quotient_of, ratio_of, speed_of, total
from outrider.core.errors import OptionError


def timed(mean: float, *, rounds: int = 5, chunks: int = 8, noise: float = 0.05, seed: int = 0, drift: float = 0.0):
    """Seconds with noise, outliers, and a drift shared by whoever uses the same seed."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(1000 + seed // 10)
    table = mean * (1 + noise * rng.standard_normal((rounds, chunks)))
    table[rng.random((rounds, chunks)) < 0.05] *= 3
    return (table * (1 + drift * shared.standard_normal((rounds, 1)))).tolist()


def test_the_total_ignores_an_outlier() -> None:
    assert total([[1.0, 2.0], [1.0, 90.0], [1.0, 2.0]]) == 3.0


def test_a_single_round_has_no_interval() -> None:
    assert speed_of(10, [[2.0]]) == Estimate(5.0, 5.0, 5.0, 1)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for trial in range(200):
        value = ratio_of(timed(0.5, seed=10 * trial, drift=0.1), timed(1.0, seed=10 * trial + 1, drift=0.1))
        covered += value.low <= 2.0 <= value.high
    assert covered >= 180


def test_two_runs_of_the_same_agree() -> None:
    agree = 0
    for trial in range(100):
        one, other = (ratio_of(timed(0.5, seed=100 * trial + i), timed(1.0, seed=100 * trial + i + 1)) for i in (0, 50))
        agree += one.low <= other.high and other.low <= one.high
    assert agree >= 97


def test_a_quotient_sees_five_percent() -> None:
    old = (timed(1.0, seed=1, noise=0.02), timed(2.0, seed=2, noise=0.02))
    new = (timed(1.05, seed=3, noise=0.02), timed(2.0, seed=4, noise=0.02))
    assert quotient_of(new, old).high < 1 < quotient_of(old, old).high


def line(label: str, suite: str, times: Any) -> dict[str, Any]:
    number = {"value": 1.0, "low": 1.0, "high": 1.0, "rounds": 5}
    figures = dict.fromkeys(("tokens_per_pass", "acceptance", "waste", "pass_seconds", "bandwidth_fraction", "identical"), 1.0)
    fixed = {"label": label, "suite": suite, "batch_size": 1, "by_depth": [], "split": {}, "memory": 0}
    return {**fixed, **figures, "speed": number, "speedup": number, "times": times}


def document(seed: int, *, method: float = 0.5, plain: float = 1.0, machine: float = 1.0) -> dict[str, Any]:
    times = {"plain": timed(plain * machine, seed=seed, noise=0.02), "fast": timed(method * machine, seed=seed + 1, noise=0.02)}
    ruler = {"suite": "s", "batch_size": 1, "times": timed(0.01 * machine, seed=seed + 2, noise=0.02)}
    return {"kind": "outrider bench", "lines": [line(name, "s", table) for name, table in times.items()], "ruler": [ruler]}


def slower(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [change.label for change in compare(old, new) if change.counts and change.regressed(0.02)]


def test_compare_reports_a_regression_of_five_percent_and_no_other() -> None:
    before = document(10)
    assert slower(before, document(20)) == []
    assert slower(before, document(20, machine=1.3)) == [], "a slower machine is not slower code"
    assert slower(before, document(20, method=0.525)) == ["fast"], "a slower method"
    assert slower(before, document(20, method=0.525, plain=1.05)) == ["plain", "fast"], "what slows plain decoding too"
    assert "SLOWER" in changes_table(compare(before, document(20, method=0.55)), 0.02)


def test_pairs_of_runs_see_through_what_differs_from_process_to_process() -> None:
    """Every process is a few percent off in what it makes of a method: one pair may deceive, eight do not."""
    offs = np.random.default_rng(5).normal(1, 0.03, (3, 8))
    old, same, slow = (
        [document(40 * i + 10 * side, method=0.5 * share * float(off)) for i, off in enumerate(offs[side])]
        for side, share in enumerate((1.0, 1.0, 1.05))
    )

    def found(new: list[dict[str, Any]], threshold: float = 0.02) -> list[str]:
        return [change.label for change in compare_runs(old, new) if change.counts and change.regressed(threshold)]

    assert found(same) == [] and found(slow) == ["fast"]
    with pytest.raises(OptionError, match="cannot be paired"):
        compare_runs(old[:2], same[:2])


def test_compare_takes_the_prompts_both_runs_have() -> None:
    """A time limit may have cut one run shorter; its last chunks are much slower here."""
    longer = document(10)
    for table in [*(one["times"] for one in longer["lines"]), longer["ruler"][0]["times"]]:
        for row in table:
            row += [5.0, 5.0]
    changes = compare(document(10), longer)
    assert [change.tokens_per_pass for change in changes] == [None, None]
    assert all(change.speed.value == pytest.approx(1) for change in changes)


def test_compare_refuses_runs_of_something_else() -> None:
    short, long = ({**document(0), "run": {"max_tokens": count}} for count in (8, 64))
    with pytest.raises(OptionError, match="different things"):
        compare(short, long)


def test_compare_refuses_other_files() -> None:
    with pytest.raises(OptionError, match="outrider bench"):
        compare({"kind": "something"}, document(0))
    with pytest.raises(OptionError, match="in common"):
        other = document(1)
        other["lines"] = [line("plain", "another", [[1.0]])]
        compare(document(0), other)


def test_a_curve_is_read_between_and_beyond_its_points() -> None:
    curve = PassCurve(8, 1, (1, 3, 5), (1.0, 2.0, 1.5))
    assert [curve.at(n) for n in (0, 1, 2, 3, 4, 9)] == [1.0, 1.0, 1.5, 2.0, 1.75, 1.5]
    assert PassCurve.from_json(curve.to_json()) == curve


def test_plots_are_well_formed_and_inside_their_frame() -> None:
    from xml.etree import ElementTree

    from outrider.bench.svg import Bar, bars, lines, nice_steps

    assert nice_steps(1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and nice_steps(0.0)[-1] == 1.0
    for most in (0.003, 0.97, 1.1, 44.0, 1320.0, 9e6):
        steps = nice_steps(most)
        assert steps[-1] >= most > steps[-2] and 4 <= len(steps) <= 7
    many = [Bar(f"a rather long label, number {n} <&>", 0.5 + n, 0.4 + n, 0.9 + n) for n in range(5)]
    curves = {"one": [(1.0, 2.0), (8.0, 3.0)], "two & more": [(1.0, 0.0), (64.0, 9.0)]}
    for plot in (bars(many), lines(curves, x_title="x", y_title="y", log_x=True)):
        root = ElementTree.fromstring(plot)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for node in root.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert 0 <= float(node.attrib.get(name, 0)) <= width
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(node.attrib.get(name, 0)) <= height
    assert lines({}, x_title="", y_title="") == ""
