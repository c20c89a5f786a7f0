"""Step-level routing: the ends are the two writers alone, the oracle is best, a learnt router beats a coin, and models run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.routing.advantage import Advantage, Features, compare, learn_advantage, spearman
from outrider.routing.language_models import LikelihoodReward, ModelWriter, StateFeatures, WordReward, states_of
from outrider.routing.routers import Coin, Oracle, RewardThreshold
from outrider.routing.steps import Reward, Router, StepWriter, WrittenStep, route, share_escalated

NUM_STEPS = 6


class Skilled(StepWriter):
    """Writes ``right`` or ``wrong`` in a line. The second and the fifth line are hard for it, as far as it lacks skill."""

    def __init__(self, skill: float) -> None:
        self.skill, self.num_written = skill, 0

    def write(self, texts: Sequence[str], seeds: Sequence[int]) -> list[WrittenStep]:
        self.num_written += len(texts)
        return [
            self._step(text.count("\n"), random.Random(f"{self.skill} {seed}")) for text, seed in zip(texts, seeds, strict=True)
        ]

    def _step(self, place: int, chance: random.Random) -> WrittenStep:
        hard = 0.8 if place in (1, 4) else 0.02
        return WrittenStep(
            "wrong\n" if chance.random() < hard * (1 - self.skill) else "right\n", is_last=place == NUM_STEPS - 1
        )


class Spelling(Reward):
    def score(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> list[float]:
        return [0.9 if step.text == "right\n" else 0.1 for step in steps]


class Place(Features):
    def of(self, texts: Sequence[str], steps: Sequence[WrittenStep]) -> Tensor:
        return torch.tensor(
            [
                [float(text.count("\n") in (1, 4)), float(step.text == "right\n")]
                for text, step in zip(texts, steps, strict=True)
            ]
        )


DRAFT, TARGET, REWARD = Skilled(0.0), Skilled(0.95), Spelling()
PROMPTS = [""] * 200


def routed(router: Router, prompts: Sequence[str] = PROMPTS) -> tuple[float, float]:
    texts = route(prompts, DRAFT, TARGET, router, num_steps=NUM_STEPS)
    return sum("wrong" not in text.text for text in texts) / len(texts), share_escalated(texts)


def test_the_ends_are_the_writers_alone() -> None:
    own = route(["", ""], TARGET, TARGET, Coin(0.0), num_steps=NUM_STEPS)
    assert [len(text.steps) for text in own] == [NUM_STEPS] * 2 and own[0].is_done
    assert routed(Coin(0.0))[1] == 0 and routed(Coin(1.0))[1] == 1
    assert routed(RewardThreshold(REWARD, 0.05))[1] == 0 and routed(RewardThreshold(REWARD, 0.9))[1] == 1
    assert 0.2 < routed(Coin(0.3))[1] < 0.4


def test_the_target_writes_what_a_router_asks_for_and_no_step_twice() -> None:
    target = Skilled(0.5)
    route(PROMPTS[:20], DRAFT, target, Coin(0.0), num_steps=NUM_STEPS)
    assert target.num_written == 0
    texts = route(PROMPTS[:20], DRAFT, target, RewardThreshold(REWARD, 0.5), num_steps=NUM_STEPS)
    assert target.num_written == sum(sum(text.escalated) for text in texts) > 0
    target.num_written = 0
    route(PROMPTS[:20], DRAFT, target, Oracle(REWARD), num_steps=NUM_STEPS)
    assert target.num_written == 20 * NUM_STEPS, "the oracle looks at every step of the target's"


def test_a_text_follows_from_its_seed() -> None:
    def texts(seed: int) -> list[str]:
        return [text.text for text in route(PROMPTS[:30], DRAFT, TARGET, Coin(0.5), num_steps=NUM_STEPS, seed=seed)]

    assert texts(3) == texts(3) != texts(4) and len(set(texts(3))) > 1


def test_learnt_routing_lies_between_a_coin_and_the_oracle(tmp_path: Path) -> None:
    found = compare(PROMPTS, DRAFT, TARGET, REWARD, Place(), num_steps=NUM_STEPS, seed=1)
    learnt = learn_advantage(found, Place())
    chances = dict(
        zip(
            [(1.0, 0.0), (1.0, 1.0), (0.0, 1.0)],
            learnt.predicted(["\n", "\n", ""], [WrittenStep("wrong\n"), WrittenStep("right\n"), WrittenStep("right\n")]),
            strict=True,
        )
    )
    assert chances[1.0, 0.0] > 0.8 > 0.3 > chances[0.0, 1.0], "a wrong step gains, a right one does not"
    assert spearman(learnt.chances(found.seen), found.gains) > 0.8
    right, share = routed(learnt)
    oracle, coin = routed(Oracle(REWARD)), routed(Coin(share))
    assert oracle[0] + 0.05 > right > coin[0] + 0.2 and share < 0.5
    learnt.save(tmp_path / "new" / "router.json", {})
    again = Advantage.load(tmp_path / "new" / "router.json", Place())
    assert list(again.weights) == list(learnt.weights)
    with pytest.raises(OptionError, match="belongs to another model"):
        again.chances(torch.zeros(1, 5))
    with pytest.raises(OptionError, match="nothing to learn"):
        learn_advantage(compare(PROMPTS[:4], TARGET, TARGET, REWARD, Place(), num_steps=1), Place())


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1) and spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4), "equal values share their mean rank"


@pytest.fixture(scope="module")
def models() -> tuple[LLM, LLM]:
    return LLM(bundled_path("draft"), method="plain"), LLM(method="plain")


def test_models_write_step_by_step(models: tuple[LLM, LLM]) -> None:
    """All steps by one model are that model's own text."""
    draft, target = (ModelWriter(llm, end=".", max_tokens=40) for llm in models)
    prompts = ["Once upon a time", "Tom had a dog"]
    for share, llm in ((0.0, models[0]), (1.0, models[1])):
        texts = route(prompts, draft, target, Coin(share), num_steps=3)
        for text in texts:
            assert all(step.text.endswith(".") != step.is_last for step in text.steps) and len(text.steps) <= 3
            assert text.is_done == text.steps[-1].is_last, "a text that ends itself has no further step"
            before = text.prompt
            for step in text.steps:
                (own,) = llm.generate([before], SamplingParams(max_tokens=40))
                assert own.text.startswith(step.text)
                before += step.text


def test_a_reward_is_the_share_of_a_word(models: tuple[LLM, LLM]) -> None:
    llm = models[1]
    reward = WordReward(llm, good=" He", bad=" She")
    texts, steps = ["Tom had a", "Anna had a"], [WrittenStep(" dog."), WrittenStep(" red hat.")]
    good, bad = (llm.codec.encode(word, add_special_tokens=False)[0] for word in (" He", " She"))
    for text, step, score in zip(texts, steps, reward.score(texts, steps), strict=True):
        with torch.inference_mode():
            law = llm.target.logits(states_of(llm, [text + step.text])[1][0][-1]).double().softmax(-1)
        assert score == pytest.approx(float(law[good] / (law[good] + law[bad])), abs=1e-5)
    with pytest.raises(OptionError, match="same token"):
        WordReward(llm, good=" He", bad=" He")


def test_features_hold_the_log_probabilities_of_the_step(models: tuple[LLM, LLM]) -> None:
    llm = models[0]
    (out,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, logprobs=0))
    assert out.logprobs is not None
    said = [each.logprob for each in out.logprobs]
    (row,) = StateFeatures(llm).of(["Once upon a time"], [WrittenStep(out.text)])
    assert row[0] == pytest.approx(sum(said) / 4, abs=1e-3) and row[1] == pytest.approx(min(said), abs=1e-3)
    (likely,) = LikelihoodReward(llm).score(["Once upon a time"], [WrittenStep(out.text)])
    assert likely == pytest.approx(float(row[0].exp()), abs=1e-4)
    assert row[2:].pow(2).mean() == pytest.approx(1.0, abs=1e-4)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["route", "Once upon a time", "--end", ".", "--max-steps", "2", "-n", "24"]
    assert main([*asked, "--threshold", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Once upon a time") and "2 of 2 steps by the target" in shown.err and "LOSSY" in shown.err
    for more, wrong in (
        (["--router", "rsd"], "--reward"),
        (["--router", "arbitrage"], "--learned"),
        (["--max-steps", "0"], "0"),
    ):
        assert main([*asked, *more]) == 2 and wrong in capsys.readouterr().err
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "\n".join(map(json.dumps, ["Once upon a time", {"prompt": "Tom had"}, {"question": "Anna saw"}, "A cat"]))
    )
    options = ["-O", f"reward={bundled_path('target')}", "-O", "good= He", "-O", "bad= She", "-O", "end=.", "-O", "num_steps=2"]
    assert main(["train", "router", "--data", str(questions), "--out", str(tmp_path), *options]) == 0
    assert "rank correlation" in capsys.readouterr().out
    assert main([*asked, "--router", "arbitrage", "--learned", str(tmp_path / "router.json")]) == 0
    both = ["--data", str(questions), "--out", str(tmp_path / "other.json")]
    assert main(["train", "router", *both, *options, "-O", "sees=reward"]) == 0
    capsys.readouterr()
    other = [*asked, "--router", "arbitrage", "--learned", str(tmp_path / "other.json")]
    assert main([*other, "--reward", bundled_path("target")]) == 0 and main(other) == 2
    assert "name that reward model with --reward" in capsys.readouterr().err
    assert main(["train", "router", *both, *options, "-O", "sees=all"]) == 2
    assert "valid: draft, reward" in capsys.readouterr().err
    assert main(["train", "router", "--data", str(questions), "--out", str(tmp_path)]) == 2
    assert "-O reward=MODEL" in capsys.readouterr().err
