"""Jacobi drafting: what waits after a round is the target's own choice after every guess that was not accepted."""

from __future__ import annotations

import pytest
import torch

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Observation, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.drafters.itself.jacobi import Jacobi, JacobiOptions

VOCAB = 17
CPU = torch.device("cpu")


def context_of(rows: list[list[int]], temperature: float = 0.0) -> Context:
    states = [RequestState.of(Request(row, SamplingParams(temperature=temperature, seed=i))) for i, row in enumerate(rows)]
    noise = Noise(torch.tensor([state.seed for state in states]), torch.zeros(len(rows), dtype=torch.int64))
    return Context(rows, Sampler(states, VOCAB, CPU), noise, CPU)


def chains(draft: Draft) -> list[list[int]]:
    assert draft.tree.is_chain and draft.draws is Draws.DETERMINISTIC
    return [row[:size] for row, size in zip(draft.tree.tokens.tolist(), draft.tree.sizes, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_choices_after_unaccepted_guesses_wait(temperature: float) -> None:
    drafter, context = Jacobi(), context_of([[1, 2], [3], [4, 5, 6]], temperature)
    state = drafter.start(context.tokens, {})
    draft = drafter.propose(state, context, Plan((4, 2, 4), (9, 9, 3)))
    assert [len(chain) for chain in chains(draft)] == [5, 3, 4]
    logits = 3 * torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    choices = context.sampler.law(logits, draft.tree, context.noise).choices.tolist()
    accepted = [1, 0, 3]
    paths = [list(range(n + 1)) for n in accepted]
    drafter.observe(state, Observation(draft, Scores(logits), paths, accepted, 0.0, 0.0))
    assert [row.guesses for row in state.rows] == [choices[0][2:5], choices[1][1:3], []]
    # Next round: what waits first, then what followed the last guess in the text, or that guess again.
    rows = [[*row, 9] for row in context.tokens]
    again = chains(drafter.propose(state, context_of(rows, temperature), Plan((6, 1, 0), (6, 6, 6))))
    assert again[0][:4] == [9, *choices[0][2:5]] and len(again[0]) == 7
    assert again[1:] == [[9, choices[1][1]], [9]]


def test_fills_follow_the_text() -> None:
    context, plan = context_of([[1, 2, 3, 1, 4, 1], [5]]), Plan((4, 2), (4, 2))
    follow, repeat = Jacobi(), Jacobi(JacobiOptions(fill="repeat"))
    assert chains(follow.propose(follow.start(context.tokens, {}), context, plan)) == [[1, 4, 1, 4, 1], [5, 5, 5]]
    assert chains(repeat.propose(repeat.start(context.tokens, {}), context, plan)) == [[1] * 5, [5] * 3]


def test_a_round_with_every_guess_accepted_leaves_none() -> None:
    drafter, context = Jacobi(), context_of([[1]])
    state = drafter.start(context.tokens, {})
    draft = drafter.propose(state, context, Plan((2,), (2,)))
    drafter.observe(state, Observation(draft, Scores(torch.zeros(1, 3, VOCAB)), [[0, 1, 2]], [2], 0.0, 0.0))
    assert state.rows[0].guesses == []


def test_rows_leave_repeat_and_arrive() -> None:
    drafter = Jacobi()
    state = drafter.start([[1], [2]], {})
    state.rows[0].guesses, state.rows[1].guesses = [7], [8]
    forked = state.fork([1, 1, 0]).join(drafter.start([[3]], {}))
    assert [row.guesses for row in forked.rows] == [[8], [8], [7], []]
    forked.rows[0].guesses.append(9)
    forked.rows[1].follower[1] = 2
    assert forked.rows[1].guesses == [8] and forked.rows[0].follower == {}


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match=r"fill = 'repat'.*did you mean 'repeat'"):
        JacobiOptions(fill="repat")
