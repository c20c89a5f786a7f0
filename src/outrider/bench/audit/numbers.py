"""Checks that no random number is used twice, and that the target's numbers are those of the output position.

Block and traversal verification stop because of guesses that they then discard. Meeting those numbers again in the next round
would bias it (docs/lossless.md, section 6). So all numbers of a round but the target's must differ from those of every other
round. The target's noise must be the same from whichever round a position is reached.
"""

from __future__ import annotations

import torch

from outrider.bench.audit.findings import Finding, failed, passed
from outrider.core.rng import Noise, Purpose

_ROUNDS, _LANES, _VOCAB = 24, 24, 5


def check_numbers() -> Finding:
    """Check every pair of nearby rounds and lanes, with the generator that decoding uses."""
    seeds, lanes = torch.full((_ROUNDS,), 11), torch.arange(_LANES).expand(_ROUNDS, -1)
    noise = Noise(seeds, torch.arange(_ROUNDS))
    wrong: list[str] = []
    drawn = {
        "acceptance": noise.uniform(Purpose.ACCEPT, lanes).flatten(),
        "residual": noise.exponential(Purpose.RESIDUAL, lanes, _VOCAB).flatten(),
        "guess": noise.gumbel(Purpose.DRAFT, lanes, _VOCAB).double().flatten(),
    }
    for name, values in drawn.items():
        repeats = len(values) - len(values.unique())
        if repeats > len(values) ** 2 * 2.0**-24:  # float32 numbers of so many may meet by chance
            wrong.append(f"{repeats} of {len(values)} {name} numbers are met again in another round or lane")
    first = Noise(seeds[:1], torch.tensor([0])).target_gumbel(torch.arange(_ROUNDS)[None], _VOCAB)[0]
    later = noise.target_gumbel(torch.zeros(_ROUNDS, 1, dtype=torch.int64), _VOCAB)[:, 0]
    if not torch.equal(first, later):
        wrong.append("the target's noise depends on the round from which an output position is reached")
    if wrong:
        return failed("numbers", "random numbers are named wrongly", wrong)
    return passed("numbers", f"no number is used twice in {_ROUNDS} rounds, and the target's belong to the output position")
