"""The surplus by offset, and the accepted lengths that it predicts for drafters that read the target's states.

Every offset is probed with the state alone, with state and tokens, and with the tokens alone. The probes of an input are then
read as a chain: a guess is kept if it and those before it *at the same place* are the target's own choices. The order of the
three is a prediction about heads before anybody trains them. Medusa reads the state alone, Hydra and EAGLE read both, a drafter
without states reads the tokens.

    accepted(input)  =  mean over places t of  sum_k  prod_{j <= k} [probe_j(t) agrees],      j = 1 .. num_offsets

Hits at one place are not independent: text that is easy at one offset is easy at the next. So the product of the shares of hits
is less than what chains keep, by another factor for every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.bench.surplus.probe import ProbeOptions, ProbeScore, Readout, TextWithStates, probe

KINDS = {"tokens": (False, True), "state": (True, False), "state + tokens": (True, True)}
"""Inputs of a probe: whether it sees the state, and the tokens in between."""
DRAFTERS = {"tokens": "drafters without states", "state": "medusa", "state + tokens": "hydra, eagle"}
"""Drafters with each of these inputs."""


@dataclass(frozen=True)
class Offset:
    """The probes of one offset. The keys of ``readings`` are the names in ``KINDS``."""

    offset: int
    readings: dict[str, ProbeScore]

    @property
    def surplus(self) -> float:
        """Information that the state adds to the tokens in between, in nats."""
        return self.readings["tokens"].loss - self.readings["state + tokens"].loss

    def to_json(self) -> dict[str, Any]:
        readings = {kind: {"loss": one.loss, "agreement": one.agreement} for kind, one in self.readings.items()}
        return {"offset": self.offset, "readings": readings, "surplus": self.surplus}


@dataclass(frozen=True)
class Analysis:
    """Information in the states of a target about later tokens."""

    num_places: int
    offsets: tuple[Offset, ...]

    def accepted(self, kind: str) -> float:
        """Tokens beyond the next that a chain of guesses from this input would keep, in the mean over whole places."""
        texts = zip(*(one.readings[kind].hits for one in self.offsets), strict=True)
        kept = [torch.stack([hit[: len(hits[-1])].int() for hit in hits]).cumprod(0).sum(0) for hits in texts]
        return float(torch.cat(kept).float().mean())

    @property
    def order(self) -> list[str]:
        """The inputs, the best first."""
        return sorted(KINDS, key=self.accepted, reverse=True)

    def to_json(self) -> dict[str, Any]:
        offsets = [one.to_json() for one in self.offsets]
        accepted = {kind: self.accepted(kind) for kind in KINDS}
        return {"num_places": self.num_places, "offsets": offsets, "accepted": accepted, "order": self.order}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each offset, and one for the length of chains."""
        rows = [
            {"offset": one.offset, "surplus, nats": one.surplus, **{k: one.readings[k].agreement for k in KINDS}}
            for one in self.offsets
        ]
        return [*rows, {"offset": "kept in a chain", "surplus, nats": "", **{kind: self.accepted(kind) for kind in KINDS}}]


def analyse(
    samples: Sequence[TextWithStates], readout: Readout, *, num_offsets: int = 3, options: ProbeOptions | None = None
) -> Analysis:
    """Probe every offset from 1 on, where 1 is the token after the next one."""
    options = options or ProbeOptions()
    offsets = tuple(
        Offset(k, {kind: probe(samples, readout, k, state=s, tokens=t, options=options) for kind, (s, t) in KINDS.items()})
        for k in range(1, num_offsets + 1)
    )
    return Analysis(sum(len(one.tokens) for one in samples), offsets)


def table(found: Analysis) -> str:
    """The figures as a table for a terminal."""
    lines = [f"{'offset':>7}{'surplus (nats)':>16}" + "".join(f"{kind:>18}" for kind in KINDS)]
    for one in found.offsets:
        shares = "".join(f"{one.readings[kind].agreement:>18.3f}" for kind in KINDS)
        lines.append(f"{one.offset:>7}{one.surplus:>16.3f}{shares}")
    lines.append(f"{'accepted':>23}" + "".join(f"{found.accepted(kind):>18.2f}" for kind in KINDS))
    lines.append("predicted order: " + " > ".join(f"{kind} ({DRAFTERS[kind]})" for kind in found.order))
    return "\n".join(lines)
