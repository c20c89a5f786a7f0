"""Honest sentences: what is said when speculation pays, when it does not, and what a report calls machine and model."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.provenance import cpu_name_of, model_name
from outrider.bench.report_style import STYLE
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.cli.verdict import Idle, acceptance_of, share_text, verdict
from outrider.core.reason import Reason, ReasonCode
from outrider.core.request import Stats


def stats(passes: int, drafted: int, accepted: int, tested: int, tokens: int, score: float, draft: float = 0.0) -> list[Stats]:
    return [Stats(passes, drafted, accepted, tested, tokens, score_seconds=score, draft_seconds=draft)]


PLAIN = stats(100, 0, 0, 0, 100, score=1.0)


def said(fast: list[Stats], speedup: float, *, identical: bool = True) -> str:
    return verdict(PLAIN, fast, speedup=speedup, device="CPU", identical=identical)


def test_a_gain_is_a_gain() -> None:
    assert said(stats(40, 120, 60, 80, 100, 0.5), 2.04) == "2.04x faster than plain decoding, identical text"


def test_dear_passes_are_named_with_their_price() -> None:
    text = said(stats(50, 150, 60, 80, 100, 1.85), 0.54)
    assert text.startswith("No speed-up here (0.54x): a pass of 4.0 tokens costs 3.7 passes on this CPU, and gave 2.0 tokens;")
    assert "-K 2" in text and "faster" not in text and text.endswith("identical text")


def test_wrong_guesses_and_dear_drafts_are_told_apart() -> None:
    assert "10% of the guesses were right" in said(stats(90, 270, 9, 90, 100, 0.95), 0.9)
    text = said(stats(40, 120, 60, 80, 100, 0.5, draft=0.6), 0.9)
    assert "its draft 1.5 more" in text and "smaller draft model" in text


def test_nothing_guessed_is_said() -> None:
    assert "no guess was made on this text" in said(PLAIN, 1.0)
    assert "DIFFERENT text" in said(PLAIN, 1.0, identical=False)


def test_without_an_accepted_guess_a_better_time_is_noise() -> None:
    assert said(PLAIN, 1.06).startswith("No speed-up here (1.06x): no guess was made on this text")
    assert said(stats(100, 100, 0, 50, 100, 0.95), 1.06).startswith("No speed-up here (1.06x): a pass of 2.0 tokens")


@pytest.mark.parametrize("code", [ReasonCode.PLAIN_IS_FASTER, ReasonCode.BUDGET])
def test_a_policy_that_declined_is_quoted(code: ReasonCode) -> None:
    """A draft model had guesses: advice to try one would be wrong."""
    idle = Reason(code, {"length": 4, "gain": 0.9, "tokens": 1.8, "cost": 2.0, "budget": 3.0})
    text = verdict(PLAIN, PLAIN, speedup=0.97, device="CPU", identical=True, idle=Idle(idle))
    assert "the policy expected none to pay on this CPU" in text and "0.90x" in text and "draft model" not in text
    given = Reason(ReasonCode.FASTEST, {"length": 4, "gain": 1.9, "tokens": 1.8, "cost": 1.0})
    assert "a text that repeats itself" in verdict(PLAIN, PLAIN, speedup=1.0, device="CPU", identical=True, idle=Idle(given))
    now = verdict(PLAIN, PLAIN, speedup=1.0, device="CPU", identical=True, idle=Idle(given, drafts=True))
    assert "run it again" in now and "a text that repeats itself" not in now


def test_acceptance_is_a_dash_where_nothing_was_tested(capsys: pytest.CaptureFixture[str]) -> None:
    assert share_text(acceptance_of(PLAIN)) == "-" and share_text(acceptance_of(stats(2, 4, 1, 2, 3, 1.0))) == "50%"
    assert main(["generate", "Once upon a time", "-n", "4", "--method", "plain"]) == 0
    assert "acceptance -" in capsys.readouterr().err
    assert main(["generate", "Once upon a time", "-n", "4", "--compare", "--dtype", "float32"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plain ")]
    assert rows and rows[0].endswith(" -")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["vendor_id : AuthenticAMD", "model name\t: AMD EPYC 9654 96-Core Processor", "flags : fpu avx512f"], None),
        (
            [
                "vendor_id : GenuineIntel",
                "cpu family : 6",
                "model : 143",
                "model name : Intel Xeon Processor @ 2GHz",
                "flags : a",
            ],
            "Intel Xeon Processor @ 2GHz (GenuineIntel family 6 model 143)",
        ),
        (["processor : 0", "CPU implementer : 0x41", "CPU part : 0xd4f"], "Neoverse V2"),
    ],
)
def test_processors_have_names(lines: list[str], name: str | None) -> None:
    assert cpu_name_of(lines) == (name or "AMD EPYC 9654 96-Core Processor, avx512f")


def test_models_have_names(tmp_path: Path) -> None:
    assert model_name(bundled_path("target")).startswith("bundled target of outrider ")
    assert model_name("owner/model") == "owner/model"
    (tmp_path / "my-llama").mkdir()
    assert model_name(str(tmp_path / "my-llama")) == "my-llama"


def test_a_wide_table_is_not_clipped() -> None:
    """Heads wrap, the first column stays in sight while the rest scrolls, and paper shows everything."""
    assert "white-space:normal" in STYLE and "position:sticky" in STYLE and ".wide{overflow:visible}" in STYLE
