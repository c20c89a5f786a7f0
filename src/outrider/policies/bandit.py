"""Draft lengths as the arms of a bandit: play one, see tokens per second, learn which pays.

Nothing is assumed of acceptance or cost; the reward of a round is all that counts. UCB plays the arm with the highest mean plus
a bonus that shrinks with *that arm's own* plays. (With the total number of plays instead, the bonus is the same for every arm
and nothing is explored.) EXP3 plays at random, better arms more often, and needs no assumption that rewards come from fixed
laws. (Hou et al. 2025, "BanditSpec", arXiv 2505.15141; UCB1: Auer et al. 2002; EXP3 in the loss form with a decreasing rate:
Bubeck & Cesa-Bianchi 2012, section 3.1.)

    ucb:   argmax_i  mean_i / mean + c sqrt(log t / n_i)
    exp3:  p_i ~ exp(-eta_t L_i),   L_i += (1 - r / r_max) / p_i for the arm played,   eta_t = sqrt(log A / (A t))

What was learnt belongs to a request and dies with it. Rows of a batch share the pass and hence the arm. It is chosen from the
sum of what its rows know, and each row then records its own tokens over the round's seconds. A round in which the drafter had
no guess at all says nothing about its arm and is not booked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.policies.checks import check_between, check_count, check_nodes
from outrider.policies.lengths import plan_of

_ALGORITHMS = ("ucb", "exp3")


@dataclass(frozen=True)
class BanditOptions:
    """Which lengths to choose from, and by which algorithm."""

    num_draft_tokens: int = 8
    """Longest arm: the arms are 1, 2, 3, 4, 6, 8, 12, 16 ... up to it."""
    with_zero: bool = False
    """Offer not drafting at all as an arm too."""
    algorithm: str = "ucb"
    """Algorithm: "ucb" or "exp3"."""
    exploration: float = 0.3
    """Exploration constant c of UCB, in units of the mean reward."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""
    seed: int = 0
    """Seed of EXP3's choices. They do not change the text where the acceptance rule is coupled."""

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens)
        check_nodes(self.num_tree_nodes)
        check_count("seed", self.seed, at_least=0)
        check_between("exploration", self.exploration, 0, 100)
        if self.algorithm not in _ALGORITHMS:
            raise OptionError(f"algorithm = {self.algorithm!r} is not valid; {nearest(self.algorithm, _ALGORITHMS)}")

    @property
    def arms(self) -> tuple[int, ...]:
        steps = sorted({round(2**half) for half in range(12)} | {3 * 2**half for half in range(12)})
        inner = [length for length in steps if length < self.num_draft_tokens]
        return (*([0] if self.with_zero else []), *inner, self.num_draft_tokens)


@dataclass
class _Row:
    """Plays, rewards and importance-weighted losses by arm."""

    plays: list[float]
    rewards: list[float]
    losses: list[float]
    highest: float = 0.0

    def copy(self) -> _Row:
        return _Row(list(self.plays), list(self.rewards), list(self.losses), self.highest)


@dataclass
class _State(RowState):
    rows: list[_Row]
    arm: int = 0
    chance: float = 1.0
    """Probability with which the arm was chosen."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.rows[row].copy() for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.rows, *other.rows])

    def pooled(self) -> _Row:
        """The knowledge of all rows as one row."""

        def total(columns: Sequence[Sequence[float]]) -> list[float]:
            return [sum(column) for column in zip(*columns, strict=True)]

        plays, rewards = total([row.plays for row in self.rows]), total([row.rewards for row in self.rows])
        losses = [loss / len(self.rows) for loss in total([row.losses for row in self.rows])]
        return _Row(plays, rewards, losses, max(row.highest for row in self.rows))


@final
class Bandit(Policy):
    """UCB or EXP3 over draft lengths."""

    def __init__(self, options: BanditOptions | None = None) -> None:
        self.options = options or BanditOptions()
        self.arms = self.options.arms

    def start(self, num_rows: int) -> _State:
        empty = [0.0] * len(self.arms)
        return _State([_Row(list(empty), list(empty), list(empty)) for _ in range(num_rows)])

    def plan(self, state: _State, num_rows: int) -> Plan:
        known = state.pooled()
        state.arm, state.chance = self._ucb(known) if self.options.algorithm == "ucb" else self._exp3(known, num_rows)
        return plan_of([self.arms[state.arm]] * num_rows, self.options.num_draft_tokens, self.options.num_tree_nodes)

    def update(self, state: _State, observation: Observation) -> None:
        if self.arms[state.arm] and not any(observation.draft.num_drafted):
            return
        for row, accepted in zip(state.rows, observation.num_accepted, strict=True):
            reward = (accepted + 1) / max(observation.seconds, 1e-9)
            row.highest = max(row.highest, reward)
            row.plays[state.arm] += 1
            row.rewards[state.arm] += reward
            row.losses[state.arm] += (1 - reward / row.highest) / state.chance

    def _ucb(self, known: _Row) -> tuple[int, float]:
        """The arm that UCB plays: every arm once, then the one with the highest index."""
        if min(known.plays) == 0:
            return known.plays.index(0), 1.0
        total = sum(known.plays)
        mean = sum(known.rewards) / total
        bonus = self.options.exploration * math.sqrt(math.log(total))
        indices = [r / n / mean + bonus / math.sqrt(n) for r, n in zip(known.rewards, known.plays, strict=True)]
        return indices.index(max(indices)), 1.0

    def _exp3(self, known: _Row, num_rows: int) -> tuple[int, float]:
        num_rounds = sum(known.plays) / num_rows + 1
        rate = math.sqrt(math.log(max(len(self.arms), 2)) / (len(self.arms) * num_rounds))
        lowest = min(known.losses)
        weights = [math.exp(-rate * (loss - lowest)) for loss in known.losses]
        arm = random.Random(f"{self.options.seed}/{sum(known.plays)}").choices(range(len(weights)), weights)[0]
        return arm, weights[arm] / sum(weights)
