"""The audit passes what is lossless, measures what is not, and catches bugs planted in rules, drafters, noise and caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tiers import repeats
from tiny_pair import tiny_model

from outrider.acceptance import Block, Delta, Recursive, Rejection, Traversal, block, chains, recursive, residual
from outrider.acceptance import coupled as coupled_module
from outrider.acceptance.paths import chain_verdict
from outrider.api import LLM
from outrider.bench.audit import catalogue
from outrider.bench.audit.audit import audit
from outrider.bench.audit.betting import Gambler
from outrider.bench.audit.config import AuditConfig
from outrider.bench.audit.findings import Audit, AuditOutcome, Finding
from outrider.bench.audit.identity import ROUNDING, RULE, SCORES, Rounding, explain
from outrider.bench.audit.loss import judge_loss
from outrider.bench.audit.numbers import check_numbers
from outrider.bench.audit.proof import check_twin, prove
from outrider.bench.audit.traces import Trace
from outrider.bench.settings import Setting
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule
from outrider.core.params import SamplingParams
from outrider.core.rng import Noise, make_key
from outrider.core.sampling import Law
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.verdict import Verdict
from outrider.methods import METHODS, RULES

SMALL = AuditConfig(num_prompts=2, max_tokens=16, num_tokens=24, num_pairs=2)
WORDS = ["Once upon a time, there was a", "The dog ran to the park. The dog ran to the"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="draft-model", draft=bundled_path("draft"), dtype="float32")


def look(llm: LLM, method: str, acceptance: str | None = None, config: AuditConfig = SMALL) -> Audit:
    prompts = [llm.codec.encode(text) for text in WORDS]
    return audit(llm, Setting(method, acceptance, "fixed"), prompts, config=config)


def failures(found: Audit) -> set[str]:
    return {finding.part for finding in found.findings if finding.outcome is AuditOutcome.FAILED}


# --- what is lossless passes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proofs() -> dict[tuple[str, type, Draws], Finding]:
    return {}


@pytest.fixture
def proved_once(proofs: dict[tuple[str, type, Draws], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is proved for the first method that has it: a proof knows nothing of methods."""

    def remember(name: str, ask: Callable[..., Finding]) -> None:
        def once(rule: AcceptanceRule, draws: Draws, **more: Any) -> Finding:
            key = name, type(rule), draws
            if key not in proofs:
                proofs[key] = ask(rule, draws, **more)
            return proofs[key]

        monkeypatch.setattr(f"outrider.bench.audit.audit.{name}", once)

    remember("prove", prove)
    remember("check_twin", check_twin)


def audited_rows() -> list[Any]:
    """Every row that needs nothing; ``make test`` audits one of each room and rule. tests/contract proves all of them."""
    seen: set[tuple[str, str]] = set()
    rows: list[Any] = []
    for name, row in METHODS.items():
        kind = row.build.__module__.rpartition(".")[0], row.acceptance
        if not row.needs:
            rows.append(pytest.param(name, marks=pytest.mark.exhaustive if kind in seen else ()))
            seen.add(kind)
    return rows


@pytest.mark.usefixtures("proved_once")
@pytest.mark.parametrize("method", audited_rows())
def test_every_row_passes(llm: LLM, method: str) -> None:
    found = look(llm, method, config=AuditConfig(num_prompts=1, max_tokens=8, num_tokens=16, num_pairs=1))
    assert not found.violated, found.text()
    assert "no violation" in found.verdict


PROVABLE = [(name, row) for name, row in RULES.items() if not row.needs]
"""Rules that can be built from nothing. Those that need a trained head have contract tests of their own."""


@pytest.mark.parametrize(("name", "draws"), [(name, draws) for name, row in PROVABLE for draws in row.rule.exact_for])
def test_rules_are_proved_or_measured(name: str, draws: Draws) -> None:
    row = RULES[name]
    rule = row.build({})
    proof = prove(rule, draws, num_pairs=len(repeats(1, of=3)))
    assert check_twin(rule, draws, num_batches=len(repeats(4, of=20))).outcome is AuditOutcome.PASSED
    if row.rule.lossless:
        assert proof.outcome is AuditOutcome.PASSED and proof.data["max_distance"] < 1e-12


def test_a_lossy_rule_is_flagged_with_its_distance(llm: LLM) -> None:
    found = look(llm, "draft-model", "typical")
    assert {"declared", "proof"} <= failures(found) and not found.declared_lossless
    assert "LOSSY, as declared" in found.text()
    proof = next(finding for finding in found.findings if finding.part == "proof")
    assert proof.data["mean_distance"] > 0.05


def test_a_rule_that_is_exact_on_toys_is_measured_on_the_model() -> None:
    """Three tokens are too few for the groups of a codebook."""
    rule = RULES["gsd-partition"].build({"num_groups": 5})
    proof = prove(rule, Draws.IID, num_pairs=1)
    assert proof.outcome is AuditOutcome.SKIPPED and "happens to be exact on toys" in proof.said
    target, draft, params = tiny_model(), tiny_model(0.3), SamplingParams(temperature=1.0)
    for draws in (Draws.IID, Draws.DETERMINISTIC):
        found = judge_loss(rule, draws, (target, draft), [([1, 2, 3], [4, 5, 6])], params)
        assert found.outcome is AuditOutcome.FAILED and 0 < found.data["tv_mean"] <= found.data["tv_max"] < 1
    assert judge_loss(rule, Draws.IID, (target, None), [([1], [2])], params).outcome is AuditOutcome.SKIPPED


# --- bugs planted in rules --------------------------------------------------------------------------------------------


def caught(finding: Finding) -> bool:
    return finding.outcome is AuditOutcome.FAILED


def test_no_residual_after_a_rejection(monkeypatch) -> None:
    monkeypatch.setattr(chains, "surplus", lambda p, q: p)
    assert caught(prove(Rejection(), Draws.IID, num_pairs=3))


def test_residual_with_p_and_q_exchanged(monkeypatch) -> None:
    monkeypatch.setattr(chains, "surplus", lambda p, q: (q - p).clamp(min=0))
    assert caught(prove(Rejection(), Draws.IID, num_pairs=3))


def test_a_ratio_that_keeps_what_the_target_cannot_say(monkeypatch) -> None:
    monkeypatch.setattr(chains, "ratio", lambda p, q: p / q if p < q else 1.0)
    assert caught(check_twin(Rejection(), Draws.IID))


def test_block_without_its_clamp_and_without_pi(monkeypatch) -> None:
    monkeypatch.setattr(block, "ratio", lambda p, q: p / q if q > 0 else float(p > 0))
    assert caught(prove(Block(), Draws.IID, num_pairs=3))


def test_siblings_not_renormalised(monkeypatch) -> None:
    monkeypatch.setattr(recursive, "_norm_row", lambda weights: weights)
    monkeypatch.setattr(recursive, "_norm", lambda weights: weights)
    assert caught(prove(Recursive(), Draws.WITHOUT_REPLACEMENT, num_pairs=3))


def test_a_bug_in_the_batched_form_alone(monkeypatch) -> None:
    """The proof is about the scalar rule; what runs is compared with it."""
    right = Traversal.walk

    def walk(self, draft, law, noise):
        verdict = right(self, draft, law, noise)
        return type(verdict)(verdict.path, verdict.num_accepted, law.probs[:, 0].argmax(-1), verdict.rejected)

    monkeypatch.setattr(Traversal, "walk", walk)
    assert not caught(prove(Traversal(), Draws.IID, num_pairs=2)) and caught(check_twin(Traversal(), Draws.IID))


def test_a_law_from_before_the_sampler(monkeypatch) -> None:
    """Bonus and residual from unprocessed p: invisible at temperature 1, so the comparison has another."""

    def draw(weights, p, noise):
        return residual.draw(p.sqrt(), p, noise)

    monkeypatch.setattr(chains, "draw", draw)
    assert caught(check_twin(Rejection(), Draws.IID))


def test_one_coin_for_all_siblings(monkeypatch) -> None:
    from outrider.acceptance import delta

    monkeypatch.setattr(delta, "guess_lanes", lambda tree: torch.ones_like(tree.tokens[:, 1:]))
    assert caught(check_twin(Delta(), Draws.DETERMINISTIC))


# --- ... in the naming of random numbers ------------------------------------------------------------------------------


def test_numbers_by_output_position(monkeypatch) -> None:
    assert not caught(check_numbers())
    keys = lambda self, purpose, lanes: make_key(self.seeds[:, None], self.positions[:, None] + lanes, purpose)  # noqa: E731
    monkeypatch.setattr(Noise, "_round_keys", keys)
    assert caught(check_numbers())


def test_target_noise_by_round(monkeypatch) -> None:
    right = Noise.target_gumbel
    shifted = lambda self, depths, size: right(Noise(self.seeds + 7 * self.positions, self.positions), depths, size)  # noqa: E731
    monkeypatch.setattr(Noise, "target_gumbel", shifted)
    assert caught(check_numbers())


# --- ... in drafters --------------------------------------------------------------------------------------------------

TALKATIVE = AuditConfig(num_prompts=2, max_tokens=32, num_tokens=60, num_pairs=1)


@pytest.mark.parametrize("bug", ["greedy", "hot"])
def test_guesses_that_are_not_drawn_from_q(llm: LLM, monkeypatch, bug: str) -> None:
    right = Law.draw

    def draw(self: Law, lanes):
        if bug == "greedy":
            return self.logits.argmax(-1)
        hot = Law(self.adjusted / 2, self._sampler, self._tree, self._noise, start=self._start)
        return right(hot, lanes)

    monkeypatch.setattr(Law, "draw", draw)
    assert "guesses" in failures(look(llm, "draft-model", "rejection", TALKATIVE))


def test_siblings_sorted_by_q(llm: LLM, monkeypatch) -> None:
    from outrider.drafters.trees.candidates import Drawing

    right = Drawing.children

    def children(self, law, context, **arguments):
        tokens, possible = right(self, law, context, **arguments)
        order = law.probs.gather(2, tokens).argsort(-1, descending=True)
        return tokens.gather(2, order), possible.gather(2, order)

    monkeypatch.setattr(Drawing, "children", children)
    assert "guesses" in failures(look(llm, "draft-tree", "recursive", TALKATIVE))


# --- ... in the model's memory ----------------------------------------------------------------------------------------


def test_scores_that_depend_on_the_width_of_a_pass(llm: LLM, monkeypatch) -> None:
    """As a wrong mask or a wrong position would have it: nodes after the first see something else."""
    right = llm.target.score

    def score(tree, cache, **more):
        scores = right(tree, cache, **more)
        if tree.num_nodes in (1, 16):
            return scores
        logits = scores.logits.clone()
        logits[:, 2:] += 0.5 * torch.randn(logits[:, 2:].shape, generator=torch.Generator().manual_seed(1))
        return Scores(logits, scores.taps)

    monkeypatch.setattr(llm.target, "score", score)
    found = look(llm, "draft-model")
    assert "greedy" in failures(found)
    assert "rounding" not in failures(found), "the ruler itself was fine"


def test_the_wrong_choice_of_right_scores(llm: LLM, monkeypatch) -> None:
    def everything(tree: TokenTree, choices: torch.Tensor) -> Verdict:
        return chain_verdict(tree, torch.full((tree.batch_size,), tree.num_nodes - 1), choices[:, -1])

    monkeypatch.setattr(coupled_module, "followed_one_by_one", everything)
    monkeypatch.setattr(coupled_module.Coupled, "follows_choices", False)  # so that the native pass does not walk
    found = look(llm, "draft-model")
    greedy = next(finding for finding in found.findings if finding.part == "greedy")
    assert caught(greedy) and "rule" in greedy.details[0]


# --- explanations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    other: list[float]
    token: int
    cause: str
    plain: ClassVar[list[float]] = [1.0, 0.9999, 0.0]


@pytest.mark.parametrize(
    "case", [Case([0.9999, 1.0, 0.0], 1, ROUNDING), Case([0.0, 3.0, 0.0], 1, SCORES), Case([1.0, 0.9999, 0.0], 2, RULE)]
)
def test_every_divergence_has_a_cause(case: Case) -> None:
    plain = Trace([5, 0], [torch.zeros(3), torch.tensor(Case.plain)])
    other = Trace([5, case.token], [torch.zeros(3), torch.tensor(case.other)])
    found = explain(0, plain, other, params=SamplingParams(), rounding=Rounding(1e-4, 1.0, torch.float32))
    assert found is not None and found.cause == case.cause and found.position == 1
    assert explain(0, plain, plain, params=SamplingParams(), rounding=Rounding(0, 1, torch.float32)) is None


# --- the sequential test ----------------------------------------------------------------------------------------------


def fortune(chance: float, claimed: float, seed: int, *, count: int = 600) -> Gambler:
    gambler = Gambler(("event",), alpha=0.05)
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    for number in draws.tolist():
        gambler.bet({"event": (number < chance, claimed)})
    return gambler


def test_the_error_rate_is_kept() -> None:
    assert sum(fortune(0.3, 0.3, seed).rejected for seed in range(200)) <= 10


def test_a_bias_is_found() -> None:
    assert sum(fortune(0.4, 0.3, seed).rejected for seed in range(20)) == 20
    assert fortune(0.4, 0.3, 0).worst[1] == pytest.approx(0.1, abs=0.05)


# --- the command ------------------------------------------------------------------------------------------------------


# --- all of it ----------------------------------------------------------------------------------------------------------


def test_everything_is_every_row_and_every_rule(llm: LLM) -> None:
    settings, skipped = catalogue.every_setting(llm, lambda _: None, "fixed")
    own = {one.method for one in settings if one.acceptance is None}
    left_out = {skip.label for skip in skipped} & set(RULES)
    assert left_out <= {name for name, row in RULES.items() if row.needs}, "only rules that need something"
    assert own | {skip.label.removesuffix(" fixed") for skip in skipped} - left_out == set(METHODS)
    assert {one.acceptance for one in settings if one.acceptance} | left_out == set(RULES)
    for one in settings:
        if one.acceptance:
            assert METHODS[one.method].drafter.shape is RULES[one.acceptance].rule.shape


@pytest.mark.usefixtures("proved_once")
def test_everything_in_one_line_each(llm: LLM, monkeypatch) -> None:
    some = [Setting("suffix", None, "fixed"), Setting("draft-model", "lenient", "fixed")]
    monkeypatch.setattr(catalogue, "every_setting", lambda *_: (some, []))
    prompts, said = [llm.codec.encode(WORDS[0])], []
    config = AuditConfig(num_prompts=1, max_tokens=8, num_tokens=16, num_pairs=2)
    found = catalogue.audit_all(llm, prompts, provide=lambda _: None, config=config, say=said.append)
    assert found.text().startswith("pass") and "1 of 1 lossless settings pass, 1 of 1 lossy ones are flagged" in found.text()
    assert len(said) == 2 and not found.wrong and "one-step TV 0." in said[1]
    swapped = catalogue.Catalogue(tuple(replace(one, declared_lossless=not one.declared_lossless) for one in found.audits), ())
    assert len(swapped.wrong) == 2 and swapped.text().startswith("MISSED") and "FAIL" in swapped.text()


@pytest.mark.usefixtures("proved_once")
def test_the_command_line(capsys) -> None:
    small = ["--prompts", "1", "-n", "6", "--tokens", "6", "--dtype", "float32"]
    assert main(["audit", "bundled", "prompt-lookup", *small]) == 0
    assert "no violation found" in capsys.readouterr().out
    assert main(["audit", "bundled", "draft-model", "--acceptance", "lenient", "--json", *small]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["violated"] and not document["declared_lossless"]
    assert main(["audit", "bundled", "prompt-lookup", "--acceptance", "block"]) == 2
    assert "PromptLookup" in capsys.readouterr().err
    assert main(["audit", "bundled", "sufix"]) == 2 and "did you mean 'suffix'" in capsys.readouterr().err
    assert main(["audit", "bundled", "all", "--acceptance", "block"]) == 2
