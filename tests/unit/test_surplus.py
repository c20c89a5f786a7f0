"""What states know beyond the next token: exact on sources where it is known, and found by the probe."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.bench.surplus.analysis import Analysis, Offset, analyse, table
from outrider.bench.surplus.probe import ProbeOptions, ProbeScore, Readout
from outrider.bench.surplus.sources import HiddenMarkov
from outrider.cli.main import main

CHAIN = HiddenMarkov.markov(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64))
HIDDEN = HiddenMarkov(
    torch.tensor([[0.95, 0.05], [0.05, 0.95]], dtype=torch.float64),
    torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64),
)
CYCLE = HiddenMarkov(
    torch.roll(torch.eye(4, dtype=torch.float64), 1, 1) * 0.96 + 0.01,
    torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=torch.float64),
)
"""Four states that follow each other and say two tokens, each twice: one token tells little about the next."""
QUICK = ProbeOptions(num_steps=150, width=12, dropout=0.0, learning_rate=1e-2)


def test_a_markov_chain_has_no_surplus_and_a_hidden_one_has() -> None:
    assert abs(CHAIN.exact(1)) < 1e-7 and abs(CHAIN.exact(2)) < 1e-7
    assert HIDDEN.exact(1) == pytest.approx(0.054, abs=1e-3)
    assert HIDDEN.exact(1) > HIDDEN.exact(2) > HIDDEN.exact(3) > 0


def test_entropy_by_hand() -> None:
    """Of a chain whose token follows from nothing, and of one whose token is certain."""
    coin = HiddenMarkov.markov(torch.full((2, 2), 0.5))
    assert coin.conditional_entropy(2) == pytest.approx(0.6931, abs=1e-4)
    assert HiddenMarkov.markov(torch.eye(2).flip(0)).conditional_entropy(1) == pytest.approx(0.0, abs=1e-9)


def test_states_are_the_forward_algorithms() -> None:
    sample = HIDDEN.sample(50, seed=1)
    belief = HIDDEN.stationary
    for token, state in zip(sample.tokens.tolist(), sample.states, strict=True):
        belief = HIDDEN.step(belief, token)
        torch.testing.assert_close(state, belief.float())
    assert torch.allclose(sample.states.sum(-1), torch.ones(50))


def surplus_found(source: HiddenMarkov) -> float:
    samples = [source.sample(250, seed=seed) for seed in range(20)]
    found = analyse(samples, Readout.one_hot(len(source.emission[0])), num_offsets=1, options=QUICK)
    assert found.num_places == 5000 and "surplus" in table(found)
    return found.offsets[0].surplus


def test_the_probe_finds_what_is_there() -> None:
    """A probe that answers with any constant fails: the sources are half a nat apart, and each is met within 0.06."""
    exact = CYCLE.exact(1)
    assert exact > 0.5 and abs(CHAIN.exact(1)) < 1e-7
    assert surplus_found(CHAIN) == pytest.approx(0.0, abs=0.06)
    assert surplus_found(CYCLE) == pytest.approx(exact, abs=0.06)


def offset(k: int, **hits: list[int]) -> Offset:
    """The probes of an offset on one text, by their hits."""
    found = {
        kind.replace("_and_", " + "): ProbeScore(float(len(one) - sum(one)), (torch.tensor(one) > 0,))
        for kind, one in hits.items()
    }
    return Offset(k, found)


def test_the_order_is_that_of_accepted_lengths() -> None:
    """A guess is kept behind those that are kept at its own place: tokens and state hit equally often here."""
    first = offset(1, tokens=[1, 1, 0, 0, 1], state=[1, 1, 0, 0, 1], state_and_tokens=[1, 1, 1, 0, 1])
    second = offset(2, tokens=[0, 0, 1, 1], state=[1, 1, 0, 0], state_and_tokens=[1, 1, 0, 0])
    found = Analysis(5, (first, second))
    assert found.accepted("tokens") == pytest.approx(2 / 4)  # the last place has no second offset
    assert found.accepted("state") == pytest.approx(4 / 4)
    assert found.order == ["state + tokens", "state", "tokens"]
    assert found.offsets[0].readings["tokens"].agreement == pytest.approx(0.6)
    assert found.offsets[0].surplus == pytest.approx(1.0)


def test_hits_that_come_together_are_kept_more_often_than_their_shares_say() -> None:
    """The product of the shares would say 1/2 + 1/4."""
    together = Analysis(4, tuple(offset(k, tokens=[1, 0, 1, 0]) for k in (1, 2)))
    assert together.accepted("tokens") == pytest.approx(1 / 2 + 1 / 2)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", "--texts", "6", "-n", "12", "--offsets", "1", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_places"] > 72 and set(found["accepted"]) == {"tokens", "state", "state + tokens"}
    assert main(["analyse", "--texts", "2"]) == 2
    assert "--texts 2 is not valid" in capsys.readouterr().err
