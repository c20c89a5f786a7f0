"""Tests whether guesses are drawn from the law that they declare. Rules that compare p with q are exact only then.

Every sampled guess of every round is an outcome with a claimed law: the draft's q at its parent, without the elder siblings if
it was drawn without replacement. The test reveals drafters that take the likeliest token, sample at another temperature, sort
siblings, remove duplicates, or drop guesses they are unsure of.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.bench.audit.betting import Gambler
from outrider.bench.audit.events import GUESSED, Event, event, law_events
from outrider.bench.audit.findings import Finding, failed, passed, skipped
from outrider.core.draft import Draws
from outrider.core.drafter_turns import law_of_turn
from outrider.core.interfaces import Observation
from outrider.core.report import RoundReport

_MOST_NODES = 12
"""Most guesses of a tree that are tested: the first ones. More only cost time."""


@final
class GuessWatch:
    """A watcher that bets on every guess of the rounds it receives."""

    def __init__(self, *, alpha: float) -> None:
        self.gambler = Gambler(GUESSED, alpha=alpha)
        self.draws: Draws | None = None

    def __call__(self, report: RoundReport) -> None:
        seen, draft = report.seen, report.seen.draft
        self.draws = draft.draws if self.draws is None or draft.draws is not Draws.DETERMINISTIC else self.draws
        if draft.q is None or self.gambler.rejected:
            return
        target = torch.softmax(seen.scores.logits.float(), -1)
        for row, size in enumerate(draft.tree.sizes):
            self._row(seen, row, min(size, _MOST_NODES + 1), target[row])

    def _row(self, seen: Observation, row: int, size: int, target: Tensor) -> None:
        tree, q = seen.draft.tree, seen.draft.q
        assert q is not None
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        for node in range(1, size):
            above, elders = parents[node], [tokens[i] for i in range(1, node) if parents[i] == parents[node]]
            law = law_of_turn(q[row, above], len(elders))
            law = law.double().cpu()
            if seen.draft.draws is not Draws.IID:
                law = law.index_fill(0, torch.tensor(elders, dtype=torch.int64), 0.0)
            if float(law.sum()) <= 0:
                continue
            law = law / law.sum()
            self.gambler.bet({**law_events(law, tokens[node]), **_others(law, tokens[node], target[above].cpu(), elders)})


def _others(law: Tensor, token: int, target: Tensor, elders: list[int]) -> dict[str, Event]:
    size = min(len(law), len(target))
    favoured = torch.zeros_like(law, dtype=torch.bool)
    favoured[:size] = target[:size] > law[:size]
    found = {"target favours": event(law, token, favoured)}
    if elders:
        found["an elder sibling"] = event(law, token, torch.zeros_like(favoured).index_fill(0, torch.tensor(elders), True))
    return found


def judge_guesses(watch: GuessWatch) -> Finding:
    """The finding about the guesses of a whole run."""
    gambler = watch.gambler
    if gambler.count == 0:
        how = watch.draws.value if watch.draws else "never made"
        return skipped("guesses", f"guesses are {how}: they come with no law, and the rule needs none")
    name, excess, error = gambler.worst
    figures = f"{gambler.count} guesses, evidence {gambler.evidence:.3g} of {1 / gambler.alpha:.0g}"
    data = {"count": gambler.count, "evidence": gambler.evidence, "alpha": gambler.alpha}
    if gambler.rejected:
        worst = f"event '{name}': {excess:+.3f} from its probability under q (standard error {error:.3f})"
        return failed("guesses", f"not drawn from the q they come with: {figures}", [worst], **data)
    return passed(
        "guesses", f"drawn from their q as far as {figures} can tell (biases above {gambler.sensitivity:.3f})", **data
    )
