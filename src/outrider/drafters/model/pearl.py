"""PEARL: draft and target work at the same time, and no pass waits for the draft.

This is ``draft-model`` drafted ahead (``drafters/beside.py``), except after a wrong prediction of a round's end. There
``beside`` makes the target wait for a draft. Here the next pass scores the last token alone while the draft starts again
(*pre-verify*). After a right prediction, the next chain is ready when the pass ends (*post-verify*). Guesses are chosen with
the target's noise, so a round without guesses changes no text. Under a rule of sampled guesses it would change the numbers of
later rounds, and the text would depend on the batch. (Liu et al. 2024, PEARL, arXiv 2408.11850.)

    round time = max(pass, K + 1 draft steps), not their sum;         tokens per pass as for chains of K, less after a rejection
"""

from __future__ import annotations

from typing import ClassVar, final

from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.beside import Beside
from outrider.drafters.model.draft_model import DraftModel


@final
class Pearl(Beside):
    """Chains drafted while the target verifies."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    goes_on: ClassVar[bool] = True


def build(parts: Parts) -> Drafter:
    return Pearl(DraftModel(parts.draft_model, vocab_size=parts.target.vocab_size))


ROW = MethodRow(
    summary="a draft model writes on while the target checks: neither waits for the other",
    paper="Liu et al. 2024 (arXiv 2408.11850)",
    drafter=Pearl,
    build=build,
    needs_draft=True,
)
