"""The bench itself on the bundled pair, small: every line adds up, every file is written, reports stand alone."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest
import torch

import outrider.bench.runner as runner_module
from outrider.api import LLM
from outrider.bench.curves import PassCurve
from outrider.bench.decode import decode
from outrider.bench.limits import Limit, WarmUpCost, fit
from outrider.bench.memory import added_bytes
from outrider.bench.report import report
from outrider.bench.runner import RunConfig, Runner
from outrider.bench.session import Bench, BenchOutcome, run_bench
from outrider.bench.settings import Grid, Setting, runnable
from outrider.bench.suites import load_suites
from outrider.bench.table import size_text, table
from outrider.bundled import bundled_path
from outrider.cli.bench import load_pair
from outrider.cli.main import main
from outrider.core.params import SamplingParams
from outrider.methods import METHODS
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="draft-model", draft=bundled_path("draft"), dtype="float32")


@pytest.fixture(scope="module")
def outcome(llm: LLM) -> BenchOutcome:
    config = RunConfig(num_rounds=2, max_tokens=12, batch_sizes=(1, 2))
    grid = Grid(methods=["draft-model", "prompt-lookup"], lengths=[3])
    bench = Bench(grid, load_suites(["stories", "extraction"]), num_prompts=2, run=config, curves=False)
    return run_bench(llm, bench, drafts=[bundled_path("draft")])


def test_every_setting_on_every_suite_and_over_all(outcome: BenchOutcome) -> None:
    seen = {(line.label, line.suite, line.batch_size) for line in outcome.lines}
    labels = ("plain", "draft-model K=3", "prompt-lookup K=3")
    assert seen == {(a, b, c) for a in labels for b in ("all suites", "stories", "extraction") for c in (1, 2)}


def test_figures_add_up(outcome: BenchOutcome) -> None:
    for line in outcome.lines:
        assert sum(line.split.values()) == pytest.approx(1, abs=0.02) and min(line.split.values()) >= 0
        assert line.speed.low <= line.speed.value <= line.speed.high
        assert len(line.times) == 2 and line.identical == 1.0 and line.lossless
        assert 0 <= line.waste <= 1 and line.bandwidth_fraction > 0  # how much depends on what else runs here
        if line.label == "plain":
            assert line.tokens_per_pass == 1.0 and line.speedup.value == 1.0 and not line.by_depth
        if line.label.startswith("draft-model"):
            assert line.tokens_per_pass > 1 and line.memory > 8_000_000 and len(line.by_depth) == 3
            assert line.by_depth[0] > 0.15


def test_the_table_and_the_report_hold_every_line(outcome: BenchOutcome) -> None:
    text = table(outcome.lines, outcome.skipped)
    curves = [PassCurve(32, 1, (1, 2, 4, 8), (0.001, 0.0011, 0.0013, 0.002)).to_json()]
    page = report(json.loads(json.dumps({**outcome.document, "curves": curves})))
    for line in outcome.lines:
        assert line.label in text and line.label in page
    titles = ("Speed-up over plain decoding", "Acceptance per position", "Cost against tree size", "Speed against batch")
    assert page.count("<svg") == 4 and all(title in page for title in titles)
    assert page.count("<table class='heat'>") == 3, "speed-ups by suite at two batch sizes, acceptance of all settings"
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|<script", page), "nothing from elsewhere"


def test_the_table_of_methods_is_read_not_repeated(llm: LLM) -> None:
    settings = Grid().settings()
    assert [setting.method for setting in settings] == ["plain", *(name for name in METHODS if name != "plain")]
    kept, skipped = runnable(llm, settings, lambda _: None)
    assert {s.label for s in skipped} | {s.label for s in kept} == set(METHODS)
    assert all("datastore" in skip.reason for skip in skipped if METHODS[skip.label].needs == ("datastore",))


def test_a_tally_counts_what_the_statistics_count(llm: LLM) -> None:
    for name in ("draft-model", "best-first"):
        params = [SamplingParams(max_tokens=20, ignore_eos=True)] * 2
        done = decode(llm, llm.compose(name, policy="fixed"), [[1, 50, 60], [70, 80, 90, 100]], params)
        stats = llm.generate([[1, 50, 60], [70, 80, 90, 100]], params, method=llm.compose(name, policy="fixed"))
        assert done.outputs == [output.token_ids for output in stats]
        tally = done.tally
        assert tally.num_guesses == sum(output.stats.num_drafted for output in stats)
        assert tally.num_accepted == sum(output.stats.num_accepted for output in stats) == sum(tally.accepted)
        assert sum(tally.tested) == sum(output.stats.num_tested for output in stats)
        assert tally.num_rounds == sum(output.stats.num_passes for output in stats)


def test_added_memory_counts_storages_once_and_not_the_target() -> None:
    shared, own = torch.zeros(1000), torch.zeros(500)
    holder = {"a": own, "b": own[10:], "c": [shared], "f": lambda: own}
    assert 2000 <= added_bytes([holder], [shared]) < 4000
    assert [size_text(n) for n in (12, 4_200, 25_000_000, 3.2e9)] == ["12 B", "4.2 kB", "25 MB", "3.20 GB"]


def test_labels_say_what_differs() -> None:
    assert Setting("suffix", "coupled", "adaptive", {"num_draft_tokens": 4}).label == "suffix coupled adaptive K=4"
    assert Setting("suffix").label == "suffix"


def test_settings_run_as_generate_runs_them(llm: LLM) -> None:
    assert isinstance(Setting("draft-model").compose(llm).policy, Adaptive)
    assert isinstance(Setting("draft-model", options={"num_draft_tokens": 4}).compose(llm).policy, Fixed)
    assert [one.policy for one in Grid(["suffix"], policies=["fixed", "adaptive"]).settings()] == [None, "fixed", "adaptive"]


def test_drafters_start_empty_and_policies_go_on(llm: LLM) -> None:
    runner = Runner(llm, [Setting("plain"), Setting("suffix")], {"s": [[1, 50, 60]]}, config=RunConfig(max_tokens=4))
    first, second = (runner._fresh(Setting("suffix")) for _ in range(2))
    assert first.policy is second.policy and first.drafter is not second.drafter


def test_a_draft_with_another_tokenizer_is_loaded(stories15m) -> None:
    """Rows that translate run; the others are named with the reason."""
    arguments = Namespace(model=str(stories15m), draft=["bundled"], threads=None, dtype="float32", device=None, kv_cache="auto")
    llm, _ = load_pair(arguments)
    kept, skipped = runnable(llm, Grid(["draft-model", "tli", "reencode", "suffix"]).settings(), lambda _: None)
    assert [one.method for one in kept] == ["plain", "tli", "reencode", "suffix"]
    assert "another vocabulary" in skipped[0].reason


def test_the_command_line(capsys, tmp_path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    common = ["bench", "--methods", "prompt-lookup", "--suites", "extraction", "--prompts", "1", "-n", "8", "--rounds", "2"]
    for path in files:
        extra = ["--json", str(path), "--html", str(tmp_path / "a.html"), "--no-curves", "--quiet", "--dtype", "float32"]
        assert main([*common, *extra]) == 0
    out = capsys.readouterr().out
    last = json.loads(out.strip().splitlines()[-1])
    assert set(last["lines"]) == {"plain", "prompt-lookup"} and last["files"]["json"].endswith("b.json")
    written = json.loads(files[0].read_text())
    assert written["provenance"]["threads"] == 1 and written["model"]["dtype"] == "float32" and written["bandwidth"]["peak"] > 0
    assert main(["bench", "compare", *map(str, files), "--threshold", "9"]) == 0
    for bad, word in (
        (["--methods", "sufix"], "did you mean 'suffix'"),
        (["--rounds", "0"], "at least 1"),
        (["-O", "x"], "METHOD"),
    ):
        assert main(["bench", *bad]) == 2 and word in capsys.readouterr().err


def test_a_time_limit_takes_fewer_prompts(llm: LLM) -> None:
    said: list[str] = []
    config = RunConfig(num_rounds=9, max_tokens=12, seconds=0.5)
    bench = Bench(Grid(methods=["jacobi"]), load_suites(["stories"]), run=config, curves=False)
    outcome = run_bench(llm, bench, say=said.append)
    assert any("to fit into" in text for text in said) and outcome.document["rounds"] < 9


def test_a_limit_holds_from_the_first_round(llm: LLM) -> None:
    """A limit that nothing fits into still ends: one chunk of prompts, by plain decoding and what little there was time for."""
    said: list[str] = []
    config = RunConfig(num_rounds=5, max_tokens=12, seconds=1e-6, batch_sizes=(1, 2))
    bench = Bench(Grid(methods=["jacobi", "prompt-lookup", "lookahead"]), load_suites(["stories", "chat"]), run=config)
    outcome = run_bench(llm, bench, say=said.append)
    assert outcome.document["rounds"] == 1 and outcome.document["curves"] == []
    assert {line.label for line in outcome.lines} == {"plain", "jacobi"} and {line.batch_size for line in outcome.lines} == {1}
    assert {skip.label for skip in outcome.skipped} == {"prompt-lookup", "lookahead"}
    assert all("1e-06 s" in skip.reason for skip in outcome.skipped)
    assert outcome.document["suites"] == {"stories": {"prompts": 1, "tokens": len(outcome.prompts["stories"][0])}}


def test_what_fits_is_reckoned_with_prefill() -> None:
    settings = [Setting("plain"), Setting("suffix"), Setting("swift")]
    costs = {"plain": WarmUpCost(0.0, 0.01), "suffix": WarmUpCost(0.0, 0.01), "swift": WarmUpCost(0.0, 0.05)}
    suites = {"a": [[1] * 100] * 10, "b": [[1] * 100] * 10}

    def fitted(seconds: float, **more: WarmUpCost) -> tuple[int, int, int]:
        limit = Limit(seconds)
        found = fit(settings, suites, {**costs, **more}, limit=limit, max_tokens=10, say=lambda _: None)
        return sum(map(len, found.suites.values())), len(found.suites), len(found.settings)

    assert fitted(1000) == (20, 2, 3)
    assert fitted(23) == (10, 2, 3), "half of the prompts: 3 rounds of 20 prompts take 42 s"
    assert fitted(21.5, plain=WarmUpCost(0.007, 0.01)) == (4, 2, 3), "reading 100 tokens takes 0.7 s more"
    assert fitted(3.0) == (1, 1, 3) and fitted(0.7) == (1, 1, 2) and fitted(0.0) == (1, 1, 2)


@pytest.mark.parametrize("after", [3, 9])
def test_ctrl_c_keeps_what_was_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys, after: int) -> None:
    """Interrupted in the first or the second round: whole chunks and whole rounds are reported, and written to the file."""
    calls, real = 0, runner_module.decode

    def interrupted(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > 2 + after:  # two warm up
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(runner_module, "decode", interrupted)
    path = tmp_path / "part.json"
    common = ["bench", "--methods", "jacobi", "--suites", "stories", "--prompts", "2", "-n", "6", "--rounds", "5"]
    assert main([*common, "--no-curves", "--dtype", "float32", "--json", str(path)]) == 130
    captured = capsys.readouterr()
    written = json.loads(path.read_text())
    assert "interrupted" in captured.err and written["interrupted"] and written["rounds"] == (1 if after == 3 else 2)
    assert {line["label"] for line in written["lines"]} == {"plain", "jacobi"}
    assert all(len(line["times"]) == written["rounds"] for line in written["lines"])
    assert written["suites"]["stories"]["prompts"] == (1 if after == 3 else 2)


def test_ctrl_c_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner_module, "decode", interrupted)
    assert main(["bench", "--methods", "jacobi", "--suites", "stories", "--prompts", "1", "--no-curves", "--quiet"]) == 130
    assert capsys.readouterr().out == ""
