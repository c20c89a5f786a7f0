"""Tune: forecasts from probes, races against plain decoding, an honest answer, and a config that generate accepts."""

from __future__ import annotations

import json

import pytest

from outrider.api import LLM
from outrider.bench.curves import PassCurve
from outrider.bench.results import Cell, Results
from outrider.bench.settings import Setting
from outrider.bench.stats import Estimate
from outrider.bench.tally import Tally
from outrider.bench.tune import Raced, Tuned, forecast, tune
from outrider.bench.tune_config import TuneConfig
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.methods import METHODS


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="draft-model", draft=bundled_path("draft"), dtype="float32")


def probe(setting: Setting, rounds: int, accepted: list[int], *, length: int, draft: float, verify: float = 0.01) -> Cell:
    """A made-up probe: passes of ``verify`` seconds, a host of 1 ms, drafting ``draft`` seconds per round."""
    tally = Tally(num_rounds=rounds, num_passes=rounds, num_nodes=rounds * (1 + length), num_guesses=rounds * length)
    tally.num_accepted, tally.accepted, tally.drafted = sum(accepted), accepted, [rounds] * length
    tally.draft_seconds, tally.verify_seconds = draft * rounds, verify * rounds
    seconds = (0.001 + verify + draft) * rounds
    return Cell(setting, "prompts", 1, tokens=[rounds + sum(accepted)], times=[[seconds]], tallies=[tally])


def forecasts(reach: list[float], *, per_guess: float, slope: float) -> dict[str, float]:
    """Expected speed-ups of draft-model by label, for an acceptance, a draft cost and a cost of width."""
    plain, short, long = (
        Setting("plain"),
        Setting("draft-model", options={"num_draft_tokens": 2}),
        Setting("draft-model", options={"num_draft_tokens": 8}),
    )
    counts = [round(1000 * share) for share in reach]
    cells = [
        probe(plain, 1000, [], length=0, draft=0.0),
        probe(short, 1000, counts[:2], length=2, draft=2 * per_guess, verify=0.01 + 2 * slope),
        probe(long, 1000, counts, length=8, draft=8 * per_guess, verify=0.01 + 8 * slope),
    ]
    results = Results({(c.setting.label, "prompts", 1): c for c in cells}, {})
    nodes = tuple(range(1, 18))
    curve = PassCurve(64, 1, nodes, tuple(0.01 + slope * (n - 1) for n in nodes))
    return {one.setting.label: one.speedup for one in forecast([plain, short, long], results, curve, 1)}


def test_a_forecast_is_the_formula() -> None:
    reach = [0.8**k for k in range(1, 9)]
    found = forecasts(reach, per_guess=0.001, slope=0.0005)
    tokens = 1 + sum(reach[:3])
    assert found["draft-model K=3"] == pytest.approx(tokens / (0.0115 + 0.003 + 0.001) * 0.011, rel=0.01)
    assert len(found) == 12 and list(found.values()) == sorted(found.values(), reverse=True)


def test_longer_drafts_are_forecast_where_guesses_are_good_and_cheap() -> None:
    good = forecasts([0.9**k for k in range(1, 9)], per_guess=0.0002, slope=0.0001)
    poor = forecasts([0.4**k for k in range(1, 9)], per_guess=0.003, slope=0.002)
    best = {
        name: int(max(found, key=lambda label: found[label]).split("=")[1]) for name, found in (("good", good), ("poor", poor))
    }
    assert best["good"] >= 8 and best["poor"] == 1
    assert max(poor.values()) < 1, "speculation does not pay there"


def test_tuning_finds_what_is_fast_and_measures_it(llm: LLM) -> None:
    prompts = [llm.codec.encode(text) for text in ("Once upon a time", "The dog ran to the park. The dog")]
    config = TuneConfig(methods=["draft-model", "prompt-lookup"], max_tokens=16, num_rounds=2, num_finalists=2)
    said: list[str] = []
    tuned = tune(llm, prompts, config, say=said.append)
    labels = [one.setting.label for one in tuned.raced]
    assert "plain" in labels and len(labels) == len(set(labels)) and len(labels) >= 4
    assert {one.setting.method for one in tuned.forecasts} == {"draft-model", "prompt-lookup"}
    assert tuned.best.setting.label in labels and tuned.pays == (tuned.best.setting.method != "plain")
    assert any(text.startswith("expected") for text in said)
    assert tuned.curve.seconds[0] > 0


def test_a_doubtful_gain_is_no_gain() -> None:
    doubtful = Raced(Setting("suffix"), 1.2, Estimate(1.05, 0.98, 1.12, 5), 100.0)
    plain = Raced(Setting("plain"), None, Estimate(1, 1, 1, 5), 95.0)
    assert not Tuned(plain, [doubtful, plain], [], [], PassCurve(1, 1, (1,), (1.0,))).pays


def test_the_command_writes_a_config_that_generate_accepts(capsys, tmp_path) -> None:
    path = tmp_path / "tuned.json"
    arguments = ["--prompts", "stories", "--num-prompts", "1", "-n", "8", "--rounds", "2", "--methods", "prompt-lookup"]
    assert main(["tune", "bundled", *arguments, "--out", str(path), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert json.loads(out.strip().splitlines()[-1])["method"] == written["method"]
    assert written["method"] in METHODS and written["tuned"]["raced"] and written["tuned"]["provenance"]["threads"]
    assert main(["generate", "--config", str(path), "Once", "-n", "4", "--json"]) == 0


def test_options_of_the_command_line_come_before_the_config(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    options = {"method": "prompt-lookup", "options": {"num_draft_tokens": 3}, "policy": "adaptive", "dtype": "float32"}
    path.write_text(json.dumps({"kind": "outrider config", **options}))
    assert main(["generate", "--config", str(path), "Once upon a time", "-n", "6", "--ignore-eos"]) == 0
    assert "prompt-lookup:" in capsys.readouterr().err
    assert main(["generate", "--config", str(path), "--method", "draft-model", "Once", "-n", "6"]) == 0
    assert "draft-model:" in capsys.readouterr().err
    for content, word in (("{}", "was not written by"), ("{", "is not JSON")):
        path.write_text(content)
        assert main(["generate", "--config", str(path), "Once"]) == 2
        assert word in capsys.readouterr().err
    assert main(["generate", "--config", str(tmp_path / "none.json"), "Once"]) == 2
    assert main(["tune", "bundled", "--prompts", "stories", "--rounds", "1"]) == 2
