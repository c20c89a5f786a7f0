"""The five interfaces. One sentence is the architecture:

    a DRAFTER proposes a tree, the TARGET scores it in one pass, an ACCEPTANCE rule walks it,
    the CACHES commit the accepted path, a POLICY plans the next tree.

Objects of these classes are frozen: hyper-parameters and weights. What evolves is a state value that belongs to the
requests of a batch and dies with them. Everything is batched: B requests, each with its own length and its own tree.
What only some parts can do has files of its own (``layered_target.py``, ``stopping.py``, ``lasting_memory.py`` ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.lasting_memory import LastingMemory
from outrider.core.plan import Plan
from outrider.core.prices import PriceSource
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.core.random_source import RandomSource
from outrider.core.resume import Resume
from outrider.core.rewinding import Rewinding
from outrider.core.rng import Choose, GumbelStream, Noise, gumbel_stream
from outrider.core.row_draft import RowDraft
from outrider.core.row_state import RowState, Stateless
from outrider.core.sampling import Law, Sampler
from outrider.core.scores import Scores
from outrider.core.stopping import Doubt, StopRule
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict

__all__ = [
    "AcceptanceRule",
    "Cache",
    "Context",
    "Doubt",
    "Drafter",
    "Observation",
    "Plan",
    "Policy",
    "RowDraft",
    "RowState",
    "Stateless",
    "StopRule",
    "Target",
]


class Cache(ABC):
    """A model's memory of B rows: committed tokens first, then the nodes of the tree being scored."""

    lengths: list[int]
    """Committed tokens of each row."""

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        """Make room for a tree of ``num_nodes`` after every row's committed tokens. Nodes before ``start`` are kept."""

    @abstractmethod
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the given nodes of the last scored tree, in order, and drop its other nodes. Modifies lengths and memory."""

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[b]`` tokens, or none if the cache cannot go back so far. Modifies lengths."""

    def settle(self) -> None:  # noqa: B027 (most caches have nothing to do)
        """Begin a round: drop approximate entries, so that they are computed again. Modifies lengths."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> Cache:
        """A cache whose row i is a copy of row ``rows[i]``. A row may be left out, or named several times."""

    @abstractmethod
    def join(self, other: Cache) -> Cache:
        """A cache with this one's rows, followed by the rows of ``other`` (of the same kind)."""

    def narrow(self, rows: Sequence[int]) -> Cache:
        """``fork`` this cache, which is not used again. The result may share its memory, and ``join`` may reuse it."""
        return self.fork(rows)


class Target(ABC):
    """A model that scores trees. A draft model is one too."""

    vocab_size: int
    max_len: int
    """Longest context, in tokens."""
    num_layers: int
    device: torch.device
    dtype: torch.dtype
    gumbel_stream: GumbelStream = staticmethod(gumbel_stream)
    """How Gumbel noise is computed on this target's device."""
    traits: TargetTraits = TargetTraits()
    """Properties of this target that callers must know to run it."""
    choose: Choose | None = None
    """This target's own implementation of Gumbel-max sampling; None for the common one."""

    @property
    def captured_as(self) -> Target:
        """The target whose passes are captured: itself, or the inner one of a wrapper."""
        return self

    @abstractmethod
    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache of ``batch_size`` rows."""

    @abstractmethod
    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        """Append ``rows[b]`` to row b (nothing for an empty row) and commit it; returns tapped states [len, H] per row."""

    @abstractmethod
    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        """Score nodes ``start``.. of every tree in one pass. Writes them after each row's committed tokens; commits nothing.

        Nodes before ``start`` were scored by earlier calls and are in the cache. ``resume`` (for a ``LayeredTarget``, with
        ``start`` 0) continues where ``exit`` ended. It changes no score, but taps below its layer are left out."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] raw logits from the last layer's output [..., H] (tap ``num_layers``): final norm and head."""


@dataclass(frozen=True, eq=False)
class Context:
    """What a drafter may know when it proposes: the committed tokens, how q should be shaped, and the round's noise."""

    tokens: Sequence[Sequence[int]]
    """Committed tokens of each row, prompt first; the last one is the root of the next tree."""
    sampler: Sampler
    """Shapes the drafter's logits as the target's are shaped (temperature, top-p, penalties ...)."""
    noise: Noise
    device: torch.device
    cache: Cache | None = None
    """The target's cache, for drafters that run part of the target. They may write nodes after the committed tokens."""

    @property
    def roots(self) -> list[int]:
        return [row[-1] for row in self.tokens]

    def without_guesses(self, draws: Draws) -> Draft:
        """Trees of a root alone, for a drafter that is not asked or has no guess."""
        return Draft(TokenTree.chain(torch.tensor(self.roots, device=self.device)[:, None]), draws)


@dataclass(frozen=True, eq=False)
class Observation:
    """The outcome of a round, given to the drafter and the policy after the commit."""

    draft: Draft
    scores: Scores
    paths: Sequence[Sequence[int]]
    """Committed nodes of each row, the root first. Every cache keeps these. Empty for a slot without a request."""
    num_accepted: Sequence[int]
    draft_seconds: float
    score_seconds: float
    plan: Plan | None = None
    """The plan given to the drafter, shortened to the room left. The draft may be smaller."""
    round_seconds: float | None = None
    """Seconds of the whole round without planning. None if not measured, and always None for the drafter."""
    padded: bool = True
    """Whether every row costs as much as the widest one (``TargetTraits.pads``)."""
    prompts: Prompts = NO_PROMPTS
    """The prompt tokens that the round also read."""

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.score_seconds if self.round_seconds is None else self.round_seconds


class Drafter(Rewinding, ABC):
    """Proposes trees."""

    offers: ClassVar[tuple[Draws, ...]]
    """The ways of drawing that this drafter can be built with."""
    shape: ClassVar[Shape]
    taps: tuple[int, ...] = ()
    """Target layers whose hidden states this drafter reads, of prompts and of rounds. ``round_taps`` may name fewer."""
    draws: Draws
    never_guesses: ClassVar[bool] = False  # True for plain decoding
    drafts_alone: bool = False
    """Whether it reads neither the target's states nor its cache, so it can draft on the host between captured rounds."""
    reads_logits: bool = False
    """Whether ``observe`` learns from the target's logits."""

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        """The lasting memories of this drafter and of the drafters inside it. Nothing else in a drafter changes."""
        return ()

    @abstractmethod
    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Any:
        """State for new rows. The target has prefilled all of ``rows[b]`` but its last token."""

    @abstractmethod
    def propose(self, state: Any, context: Context, plan: Plan) -> Draft:
        """Propose a tree per row within a plan that has guesses. May modify the state's scratch space; commits nothing."""

    def read_up(self, state: Any, context: Context, most: int) -> Sequence[int]:
        """Read at most ``most`` tokens of texts it has yet to read. Rows that lack more are told, and get no guesses."""
        del state, context, most
        return ()

    @final
    def asked(self, state: Any, context: Context, plan: Plan) -> Draft:
        """The proposal, checked. If the plan has no guesses, the drafter is not asked, but it still observes the round."""
        if not any(plan.max_depth):
            return context.without_guesses(self.draws)
        draft = self.propose(state, context, plan)
        draft.tree.check(context.sampler.vocab_size, type(self).__name__)
        return draft

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """This drafter as part of a captured round of ``target``; None if it needs the host."""
        del shape, target
        return None

    def round_taps(self, state: Any) -> tuple[int, ...]:
        """The taps it will read of this round, known after ``propose``. Keeping states that nobody reads takes time."""
        del state
        return self.taps

    @abstractmethod
    def observe(self, state: Any, observation: Observation) -> None:
        """Update the state with the accepted tokens."""

    def finish(self, state: Any, row: int, tokens: Sequence[int]) -> None:
        """Row ``row`` has ended with these tokens and leaves after this call. For drafters that learn across requests."""
        del state, row, tokens


class AcceptanceRule(ABC):
    """Walks a scored tree. Pure: draft, law and noise in, verdict out.

    ``walk_row`` is the rule as one reads it in a paper, one row and one question to chance at a time; it is what the
    enumeration proofs run. ``walk`` is the same for a batch, without a loop over rows, tested against it number by number.
    """

    exact_for: ClassVar[tuple[Draws, ...]]
    """Ways of drawing for which the output law is the target's, the preferred one first."""
    shape: ClassVar[Shape]
    """TREE: can walk any tree. CHAIN: can walk only chains."""
    lossless: ClassVar[bool]
    can_be_captured: ClassVar[bool] = False
    """Captured rounds can use this rule."""
    follows_choices: ClassVar[bool] = False
    """Whether it accepts exactly the target's own choices, so that a target may make the walk itself (``Law.walks``)."""
    keeps_seed: ClassVar[bool] = False
    """Whether the text equals plain decoding's with the same seed. Other rules only keep the distribution."""

    @abstractmethod
    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict: ...

    @abstractmethod
    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict: ...


class Policy(ABC):
    """Plans the next tree."""

    @abstractmethod
    def start(self, num_rows: int) -> Any:
        """State for new rows."""

    @abstractmethod
    def plan(self, state: Any, num_rows: int) -> Plan: ...

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> None:
        """Learn from a round."""

    def forget(self, state: Any | None) -> None:
        """Drop what was learnt about the drafter's guesses, because it was replaced. ``state`` belongs to the running rows."""
        del state

    def expect(self, prices: PriceSource) -> None:
        """Take the costs of rounds from ``prices``, read at the first request. For policies that weigh costs."""
        del prices

    def carry(self, state: Any, prompts: Prompts) -> None:
        """Note that the next round also reads ``prompts``; called before ``plan``. For policies that weigh costs."""
        del state, prompts

    def captured_shape(self) -> CapturedShape | None:
        """The draft lengths of captured rounds under this policy; None if a plan depends on more than the last round."""
        return None
