"""The options of the default policy, and its constants, all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from outrider.policies.checks import check_between, check_count, check_nodes


@final
@dataclass(frozen=True)
class Tuning:
    """What the default policy assumes of machines and texts. Options of a user are in ``AdaptiveOptions``."""

    memory: float = 200.0
    """Rounds that count in a cost, and in the acceptance that requests share."""
    prior_weight: float = 10.0
    """Tests that a prior is worth. Few, so that the first rounds of a request count."""
    wider: float = 0.7
    """Misses of a level with twice as many guesses, for each miss without them, before any was tested."""
    run: int = 5
    """Rounds that it takes to learn something: the pace of the moment, or what a length costs. So many plain rounds may be lost
    before anything was gained; three times as many are the most that is saved up."""
    outlier: float = 0.3
    """A round moves a cost by no more than if it had differed by this share."""
    optimism: float = 0.1
    """A length that was never timed may take this much less than its price says, before rounds show how wrong prices are."""
    margin: float = 0.05
    """Part of its risk that a draft must promise to gain, and part of the best speed that makes no difference."""
    thinking: float = 0.005
    """Part of the time that learning and deciding may take."""
    dearest: float = 0.5
    """Plain rounds that a guess may cost: no estimate may end every draft at once, or nothing is ever measured again."""
    calibration: tuple[int, ...] = (0, 1, 1, 0, 4, 4, 8, 8)
    """Lengths of the first rounds where there are no prices. One is left out where half of it takes two plain rounds."""


TUNING = Tuning()


@dataclass(frozen=True)
class AdaptiveOptions:
    """How far to go, and how much to spend on finding out."""

    num_draft_tokens: int = 16
    """Most guesses of a round."""
    probe_share: float = 0.005
    """Share of the time that may be lost on asking a drafter that does not pay, to see whether it does again."""
    loss_share: float = 0.01
    """Share of the time that speculation may lose against plain decoding before it is suspended."""
    prior_acceptance: float = 0.7
    """Acceptance assumed before any guess was tested; worth ten tests."""
    horizon: int = 50
    """Rounds of a request that count: a larger number is steadier, a smaller one follows the text faster."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "horizon"):
            check_count(name, vars(self)[name])
        check_nodes(self.num_tree_nodes)
        for name in ("probe_share", "loss_share"):
            check_between(name, vars(self)[name], 0, 0.5)
        check_between("prior_acceptance", self.prior_acceptance, 0, 1)
