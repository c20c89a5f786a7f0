"""The options of the default policy, and all its constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from outrider.policies.checks import check_between, check_count, check_nodes


@final
@dataclass(frozen=True)
class Tuning:
    """Constants of the default policy about machines and texts. User options are in ``AdaptiveOptions``."""

    memory: float = 200.0
    """Number of recent rounds that count in a cost, and in the acceptance rates shared by all requests."""
    prior_weight: float = 10.0
    """Number of tests that a prior counts for at first."""
    wider: float = 0.7
    """Assumed misses of an untested level with twice as many guesses, per miss of the present level."""
    run: int = 5
    """Rounds that it takes to learn something. As many plain rounds may be lost before anything was gained."""
    outlier: float = 0.3
    """A single round changes a cost at most as if it had differed by this share."""
    doubt: float = 0.1
    """Assumed error of the price of a guess beside a plain round, and of a single time, until rounds show theirs."""
    margin: float = 0.05
    """Share of its risk that a draft must be expected to gain."""
    thinking: float = 0.005
    """Share of the time that learning and planning may take."""
    dearest: float = 0.5
    """Most plain rounds that one guess may be estimated to cost. Otherwise one bad estimate could end all drafting."""
    calibration: tuple[int, ...] = (0, 1, 1, 0, 4, 4, 8, 8)
    """Draft lengths of the first rounds where there are no prices, up to where half of a length takes two plain rounds."""


TUNING = Tuning()


@dataclass(frozen=True)
class AdaptiveOptions:
    """How long drafts may be, and how much time may be spent on finding out what pays."""

    num_draft_tokens: int = 16
    """Most guesses of a round."""
    probe_share: float = 0.005
    """Share of the time that may be lost on probes: drafts that are not expected to pay, made to see whether they do now."""
    loss_share: float = 0.01
    """Share of the time that speculation may lose against plain decoding before it is suspended."""
    prior_acceptance: float = 0.7
    """Acceptance rate assumed before any guess was tested. It counts for ten tests at first."""
    horizon: int = 50
    """Number of recent rounds of a request that count. A larger number is steadier, a smaller one follows the text faster."""
    num_tree_nodes: int | None = None
    """Guesses in all at the longest depth, for drafters that grow trees; as many as along one path if not given."""

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens)
        check_count("horizon", self.horizon)
        check_nodes(self.num_tree_nodes)
        for name in ("probe_share", "loss_share"):
            check_between(name, vars(self)[name], 0, 0.5)
        check_between("prior_acceptance", self.prior_acceptance, 0, 1)
