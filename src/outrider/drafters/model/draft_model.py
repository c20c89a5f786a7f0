"""A small model of the same vocabulary guesses a chain, token by token (Leviathan et al. 2023, Chen et al. 2023).

There are two ways of guessing. *Deterministic*: with the target's own noise g of each output position, x = argmax(log q + g).
The guess then agrees with the target's choice argmax(log p + g) as often as q resembles p. The target's text stays a function
of the seed (greedy decoding is the case g = 0). *IID*: x ~ q with noise of its own, q kept for the rules that compare it with
p. Either way q is shaped by the request's own sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.guessing_target import GuessingTarget
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.model.cached_rows import CachedRows
from outrider.drafters.model.catch_up import catch_up, cut_back, fit, missing_from, read_up, room
from outrider.drafters.trees.chain import grow_chain


@final
@dataclass
class _State(CachedRows):
    """The draft model's cache."""

    late: list[int] = field(default_factory=list)
    """Rows whose texts are being read piece by piece; empty between rounds."""


@final
class DraftModel(Drafter):
    """Chains from another model."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)
    shape: ClassVar = Shape.CHAIN
    waits: ClassVar = ""
    drafts_alone = True

    def __init__(self, model: Target, *, vocab_size: int, draws: Draws = Draws.DETERMINISTIC) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.draws = draws

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        del shape, target
        if not self.model.traits.can_be_captured or self.draws is not Draws.DETERMINISTIC:
            return None
        from outrider.device.drafters.model.draft_model import DeviceChain  # needs triton

        return DeviceChain(cast(Any, self.model), vocab_size=self.vocab_size)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        return _State(self.model.new_cache(len(rows)))

    def read_up(self, state: _State, context: Context, most: int) -> list[int]:
        state.late = read_up(self.model, state.cache, context, most)
        return state.late

    def propose(self, state: _State, context: Context, plan: Plan) -> Draft:
        depths = [room(self.model, tokens, depth) for tokens, depth in zip(context.tokens, plan.max_depth, strict=True)]
        if not any(depths):
            return context.without_guesses(self.draws)
        if self.draws is Draws.DETERMINISTIC and plan.stop is None:
            draft = self._guessed(state, context, plan.clipped(depths))
            if draft is not None:
                return draft

        def logits_after(chain: Tensor, depths: Sequence[int]) -> Tensor:
            return self._first(state, context) if chain.shape[1] == 1 else self._advance(state, chain, depths)

        return grow_chain(context, depths, logits_after, draws=self.draws, stops=[plan.stop])

    def observe(self, state: _State, observation: Observation) -> None:
        """Keep the accepted guesses. The last guess was never fed, so the cache may lack one more token."""
        state.late = []
        if state.base:
            kept = (min(base + n, now) for base, n, now in zip(state.base, observation.num_accepted, state.cache.lengths))
            state.cache.truncate(list(kept))
            state.base = []

    def rewind(self, state: _State, lengths: Sequence[int]) -> None:
        cut_back(state.cache, lengths)

    def _guessed(self, state: _State, context: Context, plan: Plan) -> Draft | None:
        """The chain in one call, if the model can draft by itself and sampling needs no function of the path."""
        model, tempering = self.model, context.sampler.tempering
        if tempering is None or not isinstance(model, GuessingTarget) or model.vocab_size > self.vocab_size:
            return None
        rows = missing_from(model, state.cache, context, state.late)
        base = [length + len(row) for length, row in zip(state.cache.lengths, rows, strict=True)]
        guesses = model.guess(rows, state.cache, plan=plan, tempering=tempering, noise=context.noise)
        if guesses is None:
            return None
        state.base = base
        chain = torch.cat((torch.tensor(context.roots)[:, None], guesses.tokens), 1)
        tree = TokenTree.chain(chain, [depth + 1 for depth in guesses.depths])
        return Draft(tree, self.draws, beliefs=guesses.beliefs)

    def _first(self, state: _State, context: Context) -> Tensor:
        """Logits after the last committed token."""
        logits = catch_up(self.model, state.cache, context, state.late)
        state.base = list(state.cache.lengths)
        return fit(logits, self.vocab_size)

    def _advance(self, state: _State, chain: Tensor, depths: Sequence[int]) -> Tensor:
        """Feed the newest guess. Rows whose chain is long enough are scored but not advanced."""
        logits = self.model.score(TokenTree.chain(chain[:, -1:]), state.cache).logits
        state.cache.commit([[0] if depth >= chain.shape[1] else [] for depth in depths])
        return fit(logits, self.vocab_size)


def build(parts: Parts) -> Drafter:
    return DraftModel(parts.draft_model, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a small model of the same vocabulary guesses a chain",
    paper="Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318)",
    drafter=DraftModel,
    build=build,
    needs_draft=True,
)
