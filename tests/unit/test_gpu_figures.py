"""The plan of GPU measurements: what runs when time is short, what is kept, and that every program it names is there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_figures  # noqa: E402
from gpu_figures import CALL_MINUTES, PLAN, Measurement, Outcome, calls_of, run  # noqa: E402


class FakeTime:
    """A clock that moves when a measurement runs."""

    def __init__(self, **minutes: float) -> None:
        self.now, self.minutes, self.limits = 1000.0, minutes, dict[str, float]()

    def clock(self) -> float:
        return self.now

    def execute(self, measurement: Measurement, limit: float) -> Outcome:
        taken = min(limit, 60 * self.minutes.get(measurement.name, measurement.minutes))
        self.now, self.limits[measurement.name] = self.now + taken, limit
        return Outcome(measurement.name, measurement.command, taken, 0, "")


def some(**minutes: float) -> list[Measurement]:
    return [Measurement(name, f"{name}.py --json {{json}}", each) for name, each in minutes.items()]


def names(outcomes: list[Outcome]) -> list[str]:
    return [outcome.name for outcome in outcomes]


def test_what_does_not_fit_any_more_is_left_and_shorter_ones_run() -> None:
    time = FakeTime()
    found = list(run(some(first=4, long=6, short=3, last=2), 9, time.execute, time.clock))
    assert names(found) == ["first", "short", "last"]


def test_one_that_takes_longer_is_stopped_and_leaves_less_to_the_others() -> None:
    time = FakeTime(first=60)
    found = list(run(some(first=4, second=3, third=4), 9, time.execute, time.clock))
    assert names(found) == ["first", "second"] and found[0].seconds == 60 * 4 * gpu_figures.SLACK
    assert time.limits["second"] == 60 * 3, "no more than is left"


def test_the_plan_is_cut_into_calls() -> None:
    calls = calls_of(some(a=5, b=5, c=4, d=20, e=3), 9)
    assert [[each.name for each in call] for call in calls] == [["a", "c"], ["b", "e"], ["d"]]


def test_everything_fits_into_three_calls() -> None:
    calls = calls_of(PLAN, CALL_MINUTES)
    assert len(calls) == 3 and all(sum(each.minutes for each in call) <= CALL_MINUTES for call in calls)
    assert sum(map(len, calls)) == len(PLAN) == len({each.name for each in PLAN})
    text = gpu_figures.shown(calls)
    assert all(each.name in text for each in PLAN) and "call 1:" in text


@pytest.mark.parametrize("measurement", PLAN, ids=lambda each: each.name)
def test_programs_and_their_options_are_there(measurement: Measurement) -> None:
    """Read from the source: the programs need a device."""
    words = shlex.split(measurement.command)
    files = [ROOT / word for word in words if word.endswith(".py")]
    assert files and all(file.is_file() for file in files)
    if words[0].endswith(".py"):
        source = files[0].read_text(encoding="utf-8")
        known = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
        assert {word for word in words if word.startswith("--")} <= known
        assert "{json}" in words


def test_a_failure_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Processes of their own: one fails, one is too slow, one writes its results. All are kept; failures are not unpacked."""
    good = "import json,sys; print('said'); json.dump({'rows': [1]}, open(sys.argv[1], 'w'))"
    programs = {"bad": "raise SystemExit(3)", "slow": "import time; time.sleep(60)", "good": good}
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    plan = [Measurement(name, f"{tmp_path / name}.py {{json}}", 0.02 if name == "slow" else 0.5) for name in programs]
    assert gpu_figures.measure(plan, 2, tmp_path / "out") == 2
    found = json.loads((tmp_path / "out" / gpu_figures.BUNDLE).read_text())
    assert [(each["name"], each["exit_status"]) for each in found["outcomes"]] == [("bad", 3), ("slow", None), ("good", 0)]
    assert found["left"] == [] and found["outcomes"][2]["printed"] == "said\n"
    assert gpu_figures.unpack(tmp_path / "out" / gpu_figures.BUNDLE, tmp_path / "results") == ["bad", "slow"]
    assert json.loads((tmp_path / "results" / "good.json").read_text()) == {"rows": [1]}
    assert "slow: stopped" in capsys.readouterr().out


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"no measurement is called nonsense; use tests, policy_orders_rising"):
        gpu_figures.chosen(["nonsense"])
    assert names_of(gpu_figures.chosen(["prefill", "tests"])) == ["tests", "prefill"], "in order of priority"


def names_of(plan: list[Measurement]) -> list[str]:
    return [each.name for each in plan]
