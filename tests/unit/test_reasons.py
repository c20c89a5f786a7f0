"""Every plan says why, in a sentence that can be formed, and every code is reached by something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.main import main
from outrider.core.reason import Reason, ReasonCode
from outrider.engine.limits import plain_plan, within
from outrider.methods import POLICIES
from outrider.policies.chooser import RoundForecast
from outrider.policies.fixed import Fixed, FixedOptions


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_round_has_a_reason(llm: LLM, policy: str) -> None:
    method = llm.compose("draft-model", policy=policy)
    (output,) = llm.generate(["Tom had a dog."], SamplingParams(max_tokens=40, ignore_eos=True), method=method, trace=True)
    reasons = [seen.reason for seen in output.trace]
    assert all(reason is not None and reason.sentence.endswith(".") for reason in reasons)
    codes = {reason.code for reason in reasons if reason}
    if policy == "fixed":
        assert codes == {ReasonCode.GIVEN}
    if policy == "adaptive":
        assert codes <= {getattr(ReasonCode, name) for name in "CALIBRATION FASTEST PLAIN_IS_FASTER BUDGET PROBE".split()}
    assert output.trace[0].to_json()["reason"]["code"] in {code.value for code in ReasonCode}


def test_limits_give_their_own_reason() -> None:
    policy = Fixed(FixedOptions(num_draft_tokens=6))
    plan = policy.plan(policy.start(1), 1)
    assert within(plan, [None], 1024).reason == Reason(ReasonCode.GIVEN, {"length": 6})
    assert within(plan, [2], 1024).reason == Reason(ReasonCode.REQUEST_LIMIT, {"limit": 2})
    assert within(plan, [None], 3).reason == Reason(ReasonCode.MEMORY, {"room": 3})
    refused = [plain_plan([0], 1024), plain_plan([None], 0)]
    codes = (ReasonCode.REQUEST_LIMIT, {"limit": 0}), (ReasonCode.MEMORY, {"room": 0})
    assert [plan.reason for plan in refused if plan] == [Reason(*code) for code in codes]


def test_an_outlook_says_what_decided() -> None:
    outlook = RoundForecast([1.0, 1.6, 1.9], [1.0, 1.2, 1.6], [0.0, 0.1, 0.2], [1.0, 1.1, 1.4])
    chosen = outlook.reason(1, 2.0)
    assert chosen.code is ReasonCode.FASTEST and chosen.numbers["gain"] == pytest.approx(1.6 / 1.2)
    assert "1.33x" in chosen.sentence and "1.60 tokens" in chosen.sentence
    slow = RoundForecast([1.0, 1.1], [1.0, 1.2], [0.0, 0.1], [1.0, 1.1])
    assert slow.reason(0, 2.0).code is ReasonCode.PLAIN_IS_FASTER
    paused = outlook.reason(0, -0.5)
    assert paused.code is ReasonCode.BUDGET and paused.numbers["length"] == 1 and "-0.5 plain rounds" in paused.sentence


def test_why_explains_a_prompt_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "Tom had a dog.", "--max-tokens", "24", "--num-draft-tokens", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "The draft length is fixed at 3." in told[0] and told[-1].startswith("last round: ")
    assert main(["why", "Tom had a dog.", "--max-tokens", "24", "--json"]) == 0
    rounds = json.loads(capsys.readouterr().out)
    assert sum(seen["emitted"] for seen in rounds) <= 24 and rounds[0]["reason"]["code"] != "none"
    file = tmp_path / "trace.jsonl"
    bare = {"tokens": [1], "parents": [-1], "path": [], "emitted": [2], "origins": ["bonus"], "draft_seconds": 0, "seconds": 1}
    given = Reason(ReasonCode.GIVEN, {"length": 5}).to_json()
    file.write_text("\n".join(json.dumps({**bare, "request": 0, **more}) for more in ({}, {"reason": given})))
    assert main(["why", "--trace", str(file), "--rounds"]) == 0
    assert [line.split("tokens  ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "The policy gave no reason.",
        "The draft length is fixed at 5.",
    ]
    assert main(["why"]) == 2 and "give one of them" in capsys.readouterr().err
