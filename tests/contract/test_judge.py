"""Judge decoding: the head is folded without loss, both forms of the rule agree, its lossless end is exact, training learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_methods import PROMPTS, serve, tokens
from test_rules_vectorised import VOCAB_SIZE, case_of
from tiny_pair import VOCAB, tiny_model

from outrider.acceptance.delta import Delta
from outrider.acceptance.discrepancy import tv
from outrider.acceptance.distance import enumerated_law, one_guess_draft
from outrider.acceptance.judge import Judge, JudgeOptions
from outrider.cli.main import main
from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.models.judge_head import JudgeHead, basis_of, centred, features, load_judge
from outrider.train.judge import Example, JudgeSettings, last_number, read_questions, train_judge, verdict_of


def head_of(size: int, bias: float = 0.0, seed: int = 0) -> JudgeHead:
    chance = torch.Generator().manual_seed(seed)
    return JudgeHead(centred(size) @ torch.randn(size, generator=chance, dtype=torch.float64), bias)


def test_a_head_on_states_is_one_on_log_probabilities() -> None:
    chance = torch.Generator().manual_seed(0)
    readout = torch.randn(40, 6, generator=chance, dtype=torch.float64)
    states, w = (torch.randn(size, generator=chance, dtype=torch.float64) for size in ((5, 6), (6,)))
    vector = basis_of(readout) @ w
    torch.testing.assert_close(features((states @ readout.T).softmax(-1)) @ vector, states @ w)
    assert abs(float(vector.sum())) < 1e-9, "a constant added to all logits changes nothing"


@pytest.mark.parametrize("is_chain", [True, False])
def test_the_batched_form_is_the_scalar_one(is_chain: bool) -> None:
    rule, kept = Judge(head=head_of(VOCAB_SIZE)), 0
    for seed in range(20):
        case = case_of(seed, is_chain=is_chain)
        judged = rule.judged_by(case.law).double()
        batched = rule.walk(case.draft, case.law, case.noise)
        for row, size in enumerate(case.draft.tree.sizes):
            one = RowDraft.of(case.draft, case.law, row)
            scalar = rule.judge_row(one, judged[row, :size], case.sources[row])
            assert batched.rows[row] == scalar
            kept += len(scalar.path)
    assert kept > 0


def test_the_lossless_end_is_the_exact_rule() -> None:
    rule = Judge(JudgeOptions(judge_threshold=1.0), head=head_of(VOCAB_SIZE, 50.0))
    for seed in range(20):
        case = case_of(seed, is_chain=False)
        mine, exact = (one.walk(case.draft, case.law, case.noise) for one in (rule, Delta()))
        assert torch.equal(mine.num_accepted, exact.num_accepted) and torch.equal(mine.next_token, exact.next_token)


def test_the_closed_form_is_that_of_every_branch() -> None:
    chance = torch.Generator().manual_seed(3)
    for bias in (-50.0, 0.0, 50.0):
        rule = Judge(head=head_of(5, bias))
        p, q = (torch.randn(5, generator=chance, dtype=torch.float64).softmax(0) for _ in range(2))
        law = enumerated_law(rule, one_guess_draft(rule, p, q))
        assert float(tv(law, rule.one_guess(p[None], q[None]).law[0])) < 1e-12
    assert float(tv(Judge(head=head_of(5, -50.0)).one_guess(p[None], q[None]).law[0], p)) < 1e-12, "a closed gate is exact"


def test_an_open_gate_keeps_every_guess_and_a_closed_one_none(tmp_path: Path) -> None:
    target, draft, params = tiny_model(), tiny_model(0.6), SamplingParams(max_tokens=24, ignore_eos=True)
    exact = serve(target, compose("draft-model", target, draft=draft, acceptance="delta"), PROMPTS, params, batch=4)
    for bias, name in ((-1e9, "closed"), (1e9, "open")):
        JudgeHead(torch.zeros(VOCAB), bias).save(tmp_path / name, {})
        method = compose("draft-model", target, draft=draft, acceptance="judge", options={"judge": str(tmp_path / name)})
        states = serve(target, method, PROMPTS, params, batch=4)
        assert not method.lossless
        assert (tokens(states) == tokens(exact)) is (name == "closed")
        if name == "open":
            assert all(state.stats.acceptance == 1 for state in states)


def test_training_finds_what_separates_the_examples() -> None:
    """Harmful guesses leave a flat law behind them, as errors do."""
    chance = torch.Generator().manual_seed(0)
    examples = []
    for number in range(200):
        harmless = number % 3 > 0
        law = (torch.randn(8, generator=chance, dtype=torch.float64) * (3.0 if harmless else 0.2)).softmax(0)
        examples.append(Example(law.sort().values, 0.1, harmless))
    head, verdict = train_judge(examples, centred(8), settings=JudgeSettings())
    assert verdict.auc > 0.95 and verdict.kept_of_harmless > 0.8 > 0.3 > verdict.kept_of_harmful
    assert verdict.distance == pytest.approx(0.9 * (verdict.kept_of_harmless * verdict.share_harmless
        + verdict.kept_of_harmful * (1 - verdict.share_harmless)), abs=1e-6)  # fmt: skip
    assert verdict_of(head, examples, threshold=1.0).distance == 0
    with pytest.raises(OptionError, match="nothing to learn"):
        train_judge([one for one in examples if one.harmless], centred(8), settings=JudgeSettings())


def test_questions_answers_and_mistakes(tmp_path: Path) -> None:
    from outrider.bundled import bundled_path
    from outrider.codecs.load import load_codec

    assert last_number("so 3, then 1,200. Done") == "1,200" and last_number("none") == ""
    codec, path = load_codec(bundled_path("target")), tmp_path / "q.jsonl"
    path.write_text("\n".join([json.dumps("a"), json.dumps({"prompt": "b"}), json.dumps({"question": "c"})]))
    assert [len(one) > 0 for one in read_questions([path], codec)] == [True] * 3
    path.write_text("{}")
    with pytest.raises(OptionError, match="line 1 holds no question"):
        read_questions([path], codec)
    with pytest.raises(OptionError, match="outrider train judge"):
        Judge()
    with pytest.raises(CompositionError, match=r"rule 'judge' needs the option 'judge'; see docs/judge.md"):
        compose("draft-model", tiny_model(), draft=tiny_model(0.6), acceptance="judge")
    with pytest.raises(OptionError, match="judge_threshold = 2"):
        JudgeOptions(judge_threshold=2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no judge"):
        load_judge(str(tmp_path))


def test_the_command_says_that_it_is_lossy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled pair, whose sums are wrong in any case: what the command does, not how good the head is."""
    path, out = tmp_path / "q.jsonl", tmp_path / "judge"
    path.write_text(
        "\n".join(json.dumps({"question": f"Tom has {n} apples and gets {n} more. How many?"}) for n in range(2, 10))
    )
    words = ["train", "judge", "--data", str(path), "--out", str(out), "-O", "max_tokens=24", "-O", "most_guesses=5"]
    assert main(words) == 0
    assert "LOSSY" in capsys.readouterr().out
    head = load_judge(str(out))
    assert len(head.vector) == 4096 and json.loads((out / "provenance.json").read_text())["lossy"] is True
    assert main([*words, "-O", "max_token=3"]) == 2 and "max_tokens" in capsys.readouterr().err
