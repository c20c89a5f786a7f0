"""SpecEE: every draft token leaves the target where a small predictor says that the layers above would change nothing.

A guess climbs the target's layers. At some of them a predictor (``models/exit_predictor.py``) looks at the exit's few likeliest
tokens. If it trusts the exit, the guess is drawn from the exit's law. The verifying pass resumes every guess at its exit
(``staircase.py``), so a layer runs only once for a guess. (Xu et al. 2025, arXiv 2504.08850, who do not verify; here the exit
only drafts.)

    exit(u) = first asked layer l with chance_l(x_l(u)) >= tau,     q(. | u) = law(head(norm(h_exit(u))))

Two choices decide which layers are evaluated. The offline level is the layers that were most often the first right ones in
training. The online level is those of them near the exits of each row's last accepted guesses, and always the deepest one. A
guess that no predictor trusts is made at the deepest, and is the last of its row.

Where to exit and when to stop depends on states, not on the drawn guess, and the last guess is kept (Lemma C of
docs/lossless.md). So this is lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState, StopRule
from outrider.core.layered_target import LayeredTarget
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.drafters.itself.self_chain import cache_of, layered
from outrider.drafters.itself.staircase import Staircase
from outrider.drafters.trees.chain import grow_chain
from outrider.models.exit_predictor import ExitJudge, SureExits, exit_features, exit_layers, load_exit_predictor

_BARE_EXITS = 8


@dataclass(frozen=True)
class SpecEEOptions:
    """The predictors, the layers at which they are evaluated, and the required confidence."""

    predictor: str | None = None
    """Folder of a trained predictor (``outrider train specee``). Without one, an exit is trusted by its own confidence."""
    exits: tuple[int, ...] | str | None = None
    """Layers to evaluate without a predictor ("2,4,8" on the command line). Default: about eight, evenly spread."""
    threshold: float = 0.5
    """Tau: the probability from which on an exit is trusted."""
    num_exits: int = 8
    """Offline level: number of layers that may be evaluated."""
    recent: int = 5
    """Online level: number of a row's accepted guesses whose exits are remembered. 0 evaluates all layers of the offline
    level."""
    reach: int = 2
    """Online level: how many layers below and above a remembered exit are evaluated too."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold = {self.threshold!r} is not valid; use a number from 0 to 1")
        for name, least in (("num_exits", 1), ("recent", 0), ("reach", 0)):
            value = vars(self)[name]
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least {least}")
        if self.predictor is not None and self.exits is not None:
            raise OptionError("a predictor brings its own exits; leave exits out, or use num_exits to evaluate fewer of them")


@dataclass
class _Exits(RowState):
    """Exits of each row's guesses."""

    recent: list[tuple[int, ...]]
    """Exits of the last accepted guesses."""
    drafted: list[tuple[int, ...]]
    """Exits of this round's guesses."""

    def fork(self, rows: Sequence[int]) -> _Exits:
        return _Exits([self.recent[row] for row in rows], [self.drafted[row] for row in rows])

    def join(self, other: _Exits) -> _Exits:
        return _Exits(self.recent + other.recent, self.drafted + other.drafted)


@final
class SpecEE(Drafter):
    """Chains whose guesses leave the target where a predictor trusts the exit."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN

    def __init__(
        self, target: LayeredTarget, judge: ExitJudge, options: SpecEEOptions, *, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        self.target, self.judge, self.options, self.draws = target, judge, options, draws
        self.exits = judge.scheduled(options.num_exits)
        """The offline level: layers that may be evaluated, ascending."""

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _Exits:
        del taps
        return _Exits([()] * len(rows), [()] * len(rows))

    def propose(self, state: _Exits, context: Context, plan: Plan) -> Draft:
        depths = [min(depth, nodes) for depth, nodes in zip(plan.max_depth, plan.max_nodes, strict=True)]
        state.drafted = [()] * len(depths)
        if not any(depths):
            return context.without_guesses(self.draws)
        climb = _Climb(self, context, self.layers_to_ask(state.recent))
        draft = grow_chain(context, depths, climb.logits_after, draws=self.draws, stops=[plan.stop, climb])
        state.drafted = list(zip(*climb.left, strict=True))
        return replace(draft, resume=climb.stairs.resume(climb.chain))

    def observe(self, state: _Exits, observation: Observation) -> None:
        """Remember the exits whose guesses were right."""
        count = self.options.recent
        for row, accepted in enumerate(observation.num_accepted):
            seen = state.recent[row] + state.drafted[row][:accepted]
            state.recent[row] = seen[max(0, len(seen) - count) :]

    def layers_to_ask(self, recent: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The online level: exits near those of the rows' last guesses, and the deepest one. All exits, if a row has no guesses
        yet."""
        if not all(recent):
            return self.exits
        places, reach = {self.exits.index(layer) for row in recent for layer in row}, self.options.reach
        near = [layer for i, layer in enumerate(self.exits[:-1]) if any(abs(i - place) <= reach for place in places)]
        return (*near, self.exits[-1])


@final
class _Climb(StopRule):
    """One round: chains that climb together, since the rows of a batch share passes."""

    def __init__(self, drafter: SpecEE, context: Context, asked: Sequence[int]) -> None:
        self._drafter, self._asked = drafter, asked
        self._trusted = torch.zeros(len(context.tokens), dtype=torch.bool)
        self.stairs = Staircase(drafter.target, cache_of(context))
        self.chain: TokenTree
        """The nodes that were fed."""
        self.left: list[list[int]] = []
        """[node][row] where the guess after a node was made."""

    def logits_after(self, chain: Tensor, depths: Sequence[int]) -> Tensor:
        """[B, 1, V] of the newest node, each row at its own exit."""
        self.chain = TokenTree.chain(chain)
        self.stairs.add()
        trusted = torch.tensor([depth < chain.shape[1] for depth in depths])  # rows that ended wait for nobody
        found, before, left = None, None, [0] * len(depths)
        for layer in self._asked:
            logits = self._drafter.target.logits(self.stairs.climb(self.chain, layer))
            waits = trusted.to(logits.device)[:, None, None]
            found = logits if found is None else torch.where(waits, found, logits)
            left = [old if done else layer for old, done in zip(left, trusted.tolist(), strict=True)]
            trusted = trusted | self._trusts(layer, logits, before)
            if trusted.all():
                break
            before = logits
        assert found is not None, "the deepest exit is always asked"
        self._trusted = trusted
        self.left.append([layer or self._asked[0] for layer in left])
        return found

    def before(self, depth: int, law: Law) -> None:
        del depth, law

    def after(self, depth: int, law: Law, guesses: Tensor) -> list[bool]:
        """End the rows whose guess no predictor trusted."""
        del depth, law, guesses
        return self._trusted.tolist()

    def _trusts(self, layer: int, logits: Tensor, before: Tensor | None) -> Tensor:
        """[B] on the host: whether the predictor of this layer agrees to leave."""
        judge, earlier = self._drafter.judge, None if before is None else before[:, -1]
        features = exit_features(logits[:, -1], earlier, judge.num_tokens)
        return (judge.chances(layer, features) >= self._drafter.options.threshold).cpu()


def build(parts: Parts) -> Drafter:
    """Build the method with the predictor that the options name, or with the exits' own confidence."""
    target, options = layered(parts.target, "specee"), parts.options
    if options.predictor is None:
        judge: ExitJudge = SureExits(exit_layers(options.exits, target.num_layers, most=_BARE_EXITS))
    else:
        judge = load_exit_predictor(options.predictor, target)
    return SpecEE(target, judge, options, draws=parts.draws)


ROW = MethodRow(
    summary="draft tokens leave the target at the layer where a trained predictor says the rest would change nothing",
    paper="Xu et al. 2025, SpecEE (arXiv 2504.08850)",
    drafter=SpecEE,
    build=build,
    needs_layers=True,
    options=SpecEEOptions,
    defaults={"num_draft_tokens": 6},
)
