"""Falcon: blocks of any length draft as they learn, glancing reveals what it should, its tree, and a kill while it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed_run import assert_goes_on_exactly
from test_heads import TARGET, TEXT, drafted_logits, packed
from test_methods import PROMPTS, serve, tokens
from tiny_heads import random_head, random_heads

from outrider.core.errors import ModelError, OptionError
from outrider.core.params import SamplingParams
from outrider.drafters.heads.falcon import Falcon
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.trees.shape import TreeShape
from outrider.methods import compose
from outrider.models.heads.falcon import FalconHead
from outrider.train.objective import HeadObjective, HeadSettings


def new_head(block_len: int = 2) -> FalconHead:
    head = random_head("falcon", block_len=block_len)
    assert isinstance(head, FalconHead)
    return head


@pytest.mark.parametrize("block_len", [1, 3])
def test_drafting_computes_what_training_computes(block_len: int) -> None:
    """Three levels of a block of three share a pass; the fourth begins the next one."""
    head = new_head(block_len)
    batch = packed([TEXT[::-1][:9], TEXT], head.config.taps)
    with torch.no_grad():
        states = list(head.depths(batch, 4))
    for depth, law in enumerate(drafted_logits(Falcon(head), 8, 4)):
        expected = head.readout(depth, states[depth][0, 9 + 8 - 1])
        torch.testing.assert_close(law, expected, atol=2e-4, rtol=1e-4)


def test_guesses_of_a_block_do_not_know_each_other() -> None:
    """The second law of a block is the same whatever the first guess is; the next block knows both."""
    head = new_head()
    batch = packed([TEXT], head.config.taps)
    other = batch.tokens.clone()
    other[0, 12] = (other[0, 12] + 1) % 61  # the first guess below place 10
    with torch.no_grad():
        mine, theirs = (list(head.depths(one, 3)) for one in (batch, replace(batch, tokens=other)))
    moved = [float((a - b)[0, 10].abs().max()) > 1e-5 for a, b in zip(mine, theirs, strict=True)]
    assert moved == [False, False, True]


def test_columns_of_a_block_see_each_other() -> None:
    """The first law of a block stands at the column before the last, and still depends on the newest token."""
    head = new_head()
    batch = packed([TEXT], head.config.taps)
    other = batch.tokens.clone()
    other[0, 11] = (other[0, 11] + 1) % 61  # the newest token at place 10
    with torch.no_grad():
        mine, theirs = (next(head.depths(one, 1)) for one in (batch, replace(batch, tokens=other)))
    assert float((mine - theirs)[0, 10].abs().max()) > 1e-5


def test_glancing_reveals_columns_in_proportion_to_what_is_wrong() -> None:
    head = new_head().train()
    batch = packed([TEXT, TEXT[::-1]], head.config.taps)
    torch.manual_seed(0)
    none, some = head.glance(batch, 0.0), head.glance(batch, 0.5)
    assert none.revealed is not None and not none.revealed.any()
    assert some.revealed is not None and some.revealed.any() and not (some.revealed & ~batch.valid(2)).any()
    with torch.no_grad():
        plain, same, shown = (next(head.depths(one, 1)) for one in (batch, none, some))
        revealed = int(some.revealed[0].nonzero()[0])
    assert torch.equal(plain, same)
    assert torch.equal(plain[:, :revealed], shown[:, :revealed]) and not torch.equal(plain[:, revealed], shown[:, revealed])
    column, ahead = head._columns(some), head._columns(batch)
    assert column[0][0, revealed] == ahead[0][0, revealed + 2]
    torch.testing.assert_close(column[1][0, revealed], ahead[1][0, revealed + 2])


def test_less_is_revealed_from_step_to_step() -> None:
    objective = HeadObjective(new_head(), TARGET, HeadSettings(glance=0.4, glance_steps=10))
    shares = []
    for step in (0, 5, 10, 20):
        objective.write([], step)
        shares.append(objective._glance)
    assert shares == pytest.approx([0.4, 0.2, 0.0, 0.0])
    with pytest.raises(OptionError, match="glance = 2"):
        HeadSettings(glance=2)
    batch = packed([TEXT], (TARGET.num_layers,))
    with pytest.raises(OptionError, match="eagle1 heads cannot learn by glancing"):
        HeadObjective(random_head("eagle1"), TARGET, HeadSettings(glance=0.4))(batch)


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Glancing draws random numbers and follows the step."""

    def objective() -> HeadObjective:
        head = new_head()
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3, feature_weight=0.5, glance=0.8, glance_steps=8))

    assert_goes_on_exactly(objective, tmp_path)


def test_its_tree_is_wide_along_the_likeliest_path(tmp_path: Path) -> None:
    paths = set(TreeShape.spine(8, 8, 4).paths)
    assert all(sum(rank > 0 for rank in path) <= 1 for path in paths) and max(map(len, paths)) == 8
    assert {(0, 7), (0, 3, 0), (0, 0, 7)} <= paths and not {(4, 0), (0, 8), (1, 1)} & paths
    folder = random_heads("falcon", tmp_path / "f")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=3)
        expected = tokens(serve(TARGET, compose("plain", TARGET), PROMPTS, params))
        method = compose("falcon", TARGET, options={"heads": folder, "branching": "spine"})
        assert isinstance(method.drafter, Falcon) and method.drafter.static_tree is not None
        assert tokens(serve(TARGET, method, PROMPTS, params, batch=3)) == expected
    with pytest.raises(OptionError, match="branching"):
        HeadOptions(branching="spin")


def test_block_lengths_that_are_none_are_refused() -> None:
    with pytest.raises(ModelError, match="block_len = 0"):
        new_head(0)
