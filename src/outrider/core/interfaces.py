"""The five interfaces. One sentence is the architecture:

    a DRAFTER proposes a tree, the TARGET scores it in one pass, an ACCEPTANCE rule walks it,
    the CACHES commit the accepted path, a POLICY plans the next tree.

Objects of these classes are frozen: hyper-parameters and weights. What evolves is a state value that belongs to the
requests of a batch and dies with them. Everything is batched: B requests, each with its own length, its own tree and its
own number of committed tokens per round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Resume, Shape
from outrider.core.random_source import RandomSource
from outrider.core.rng import Choose, GumbelStream, Noise, gumbel_stream
from outrider.core.route import Route
from outrider.core.sampling import Law, Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.truncation import Tempering
from outrider.core.verdict import RowVerdict, Verdict


class Cache(ABC):
    """What a model remembers of B rows. Committed tokens first, the nodes of the tree being scored after them."""

    lengths: list[int]
    """Committed tokens of each row."""

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        """Make room for a tree of ``num_nodes`` after every row's committed tokens; nodes before ``start`` stay as they are."""

    @abstractmethod
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the given nodes of the last scored tree, in order, and drop its other nodes. Modifies lengths and memory."""

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget everything past ``lengths[b]`` tokens. Modifies lengths."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> Cache:
        """A cache whose row i is a copy of row ``rows[i]``: rows that leave are not named, shared prefixes are named twice."""

    @abstractmethod
    def join(self, other: Cache) -> Cache:
        """A cache of this one's rows followed by ``other``'s (of the same kind)."""

    def narrow(self, rows: Sequence[int]) -> Cache:
        """As ``fork``, for a cache that is given up: the result may live in the same memory, and is given up when joined."""
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
    """How random numbers are made where this target runs."""
    is_invariant: bool = False
    """A node's scores are the same bits whatever shares its pass: other nodes, other requests, however many. Speculative text
    is then plain text, and a batch's text that of a request alone, in every number format."""
    choose: Choose | None = None
    """... and choices with them, where it has a way of its own."""

    @property
    def pads(self) -> bool:
        """A pass costs as if every row were as wide as its widest one."""
        return True

    @property
    def has_own_threads(self) -> bool:
        """Its passes do not run on PyTorch's threads, which then had better not spin beside them."""
        return False

    @property
    def can_read_out(self) -> bool:
        """``logits`` turns states of the last layer into scores; some models have more behind it than a norm and a head."""
        return True

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
        """Score nodes ``start``.. of every tree in one pass, all of them by default. Writes them after each row's committed
        tokens; commits nothing. A tree can be grown level by level: nodes before ``start`` were scored by earlier calls with
        the same beginning of the tree, and are in the cache. Scores and taps are those of nodes ``start``.. only.

        ``resume`` (of a ``LayeredTarget``, with ``start`` 0) goes on where ``exit`` left: the scores and the cache are the
        same without it. Taps below its layer are left out, since those states of its nodes are gone."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] raw logits from the last layer's output [..., H] (tap ``num_layers``): final norm and head."""


class LayeredTarget(Target, ABC):
    """A target whose layers can be run apart, so that part of it can draft for the whole."""

    @abstractmethod
    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0) -> Tensor:
        """[B, N - start, H] nodes ``start``.. after the sublayers that ``route`` takes; ``logits`` turns it into guesses.

        Reads the committed keys and values, and writes those of the nodes in the layers whose attention it takes. As with
        ``score``, nodes before ``start`` were run by earlier calls, on the same route. What it writes is scratch: the next
        ``score`` writes over it, or (see ``Resume``) goes on from it."""


class StopRule(ABC):
    """Asked by a drafter at every depth which rows draft on; a drafter that cannot ask drafts the whole plan.

    Made for one round, so it may remember what it saw in it. It decides about the *next* guess: one that was drawn is kept
    (Lemma C of docs/lossless.md). None means every row, and costs no wait for the device.
    """

    @abstractmethod
    def before(self, depth: int, law: Law) -> Sequence[bool] | None:
        """Rows that may draw their guess number ``depth`` (from 0) from ``law`` [B, 1, V]."""

    @abstractmethod
    def after(self, depth: int, law: Law, guesses: Tensor) -> Sequence[bool] | None:
        """Rows that go on below the ``guesses`` [B] just drawn from ``law``. Rows that ended earlier are in it too."""


@dataclass(frozen=True)
class Doubt:
    """When drafts are no longer worth following. A path's *hope* is how likely all its guesses are to be accepted, each as
    likely as the drafter believes times the row's ``trust`` in it. For guesses that are chosen, not sampled.

        drafting ends after a guess   if  sum of the hopes of rows that could go on  <  level + place * their number
        a row ends before a guess     if  its hope with it  <  place
    """

    level: float
    """Tokens that come in the time of drafting one guess more for everybody, ..."""
    place: float
    """... and in that of a guess's place in the target's pass."""
    trust: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """How much to draft next: the most guesses along one path, and in all, for each row."""

    max_depth: tuple[int, ...]
    max_nodes: tuple[int, ...]
    stop: StopRule | None = None
    """Asked while drafting; may end a row's path earlier."""
    doubt: Doubt | None = None
    """For drafters that know what they believe at no cost; others draft the whole plan."""

    def clipped(self, room: Sequence[int]) -> Plan:
        """The same with no path longer than ``room[b]``."""
        depth = tuple(min(d, r) for d, r in zip(self.max_depth, room, strict=True))
        nodes = tuple(n if d else 0 for n, d in zip(self.max_nodes, depth, strict=True))
        return Plan(depth, nodes, self.stop, self.doubt)


@dataclass(frozen=True)
class TreeSearch:
    """How a best-first tree is looked for (see drafters/best_first.py)."""

    width: int
    """Nodes fed per level."""
    num_children: int
    """Candidates looked at below each of them."""
    tau: float
    """How far the model's logits are from the target's."""


class Guesses(NamedTuple):
    """Chains that a model guessed by itself."""

    tokens: Tensor
    """[B, longest], padded with zeros."""
    depths: Sequence[int]
    """Guesses of each row."""
    beliefs: Sequence[Sequence[float]] | None
    """How sure the model was of each of them, where it was to doubt."""


class GuessingTarget(Target, ABC):
    """A target that can run ahead by itself: a whole chain or tree of guesses in one call, for drafting.

    Both feed ``rows[b]`` first and commit it. Guesses are ranked by logits + temperature * target noise of their output
    position, among those that the cuts leave. None means that it cannot run ahead now; nothing was done then.
    """

    @abstractmethod
    def guess(
        self,
        rows: Sequence[Sequence[int]],
        cache: Cache,
        *,
        plan: Plan,
        tempering: Tempering,
        noise: Noise,
    ) -> Guesses | None:
        """The best guess after the best guess, as often as planned; commits all of them but the last.

        The belief in a guess is its share in the softmax of what guesses are ranked by: how far it is ahead of the others
        under the noise that the target's choice will be made with."""

    @abstractmethod
    def guess_tree(
        self,
        rows: Sequence[Sequence[int]],
        cache: Cache,
        *,
        search: TreeSearch,
        plan: Plan,
        tempering: Tempering,
        noise: Noise,
    ) -> tuple[TokenTree, Tensor] | None:
        """The best trees within the plan, root first, and [B, N] the number of each node among those fed after the root, from
        1, or 0. What was fed after the root is left uncommitted."""


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
    """The target's own, for drafters that run part of the target. They may write nodes behind the committed tokens."""

    @property
    def roots(self) -> list[int]:
        return [row[-1] for row in self.tokens]

    def without_guesses(self, draws: Draws) -> Draft:
        """Trees that are only their roots: what a drafter proposes that is not asked, or has nothing."""
        return Draft(TokenTree.chain(torch.tensor(self.roots, device=self.device)[:, None]), draws)


@dataclass(frozen=True, eq=False)
class Observation:
    """What a round taught: given to the drafter and the policy after the commit."""

    draft: Draft
    scores: Scores
    paths: Sequence[Sequence[int]]
    """Committed nodes of each row, the root first: what every cache keeps."""
    num_accepted: Sequence[int]
    draft_seconds: float
    score_seconds: float
    plan: Plan | None = None
    """What the drafter was asked for, after the cut to the room that was left; it may have found less."""
    round_seconds: float | None = None
    """The whole round, from the draft to what the drafter learns from it, planning not included; None where nobody measured it
    (and for the drafter, who is told before)."""
    padded: bool = True
    """Rows narrower than the widest saved nothing (``Target.pads``)."""

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.score_seconds if self.round_seconds is None else self.round_seconds


class RowState(ABC):
    """State of B rows that can be narrowed, repeated and joined as requests leave, fork and arrive."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> RowState: ...

    @abstractmethod
    def join(self, other: Any) -> RowState: ...

    def narrow(self, rows: Sequence[int]) -> RowState:
        """As ``fork``, for a state that is given up (see ``Cache.narrow``)."""
        return self.fork(rows)


class Stateless(RowState):
    """State of a part that remembers nothing."""

    def fork(self, rows: Sequence[int]) -> Stateless:
        del rows
        return self

    def join(self, other: Any) -> Stateless:
        del other
        return self


class Drafter(ABC):
    """Proposes trees."""

    offers: ClassVar[tuple[Draws, ...]]
    """Ways of drawing this drafter can be built with."""
    shape: ClassVar[Shape]
    taps: tuple[int, ...] = ()
    """Target layers whose hidden states it reads: of the prompt, and of rounds unless ``round_taps`` says otherwise."""
    draws: Draws

    @abstractmethod
    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Any:
        """State for rows whose target has prefilled all of ``rows[b]`` but the last token."""

    @abstractmethod
    def propose(self, state: Any, context: Context, plan: Plan) -> Draft:
        """A tree per row within a plan that has guesses. May modify the state's scratch space; commits nothing."""

    @final
    def asked(self, state: Any, context: Context, plan: Plan) -> Draft:
        """What it proposes, checked; where no guess is planned it is not even asked, and costs nothing. (It observes that
        round too.)"""
        if not any(plan.max_depth):
            return context.without_guesses(self.draws)
        draft = self.propose(state, context, plan)
        draft.tree.check(context.sampler.vocab_size, type(self).__name__)
        return draft

    def round_taps(self, state: Any) -> tuple[int, ...]:
        """Those that it will read of this round, after ``propose``: states nobody reads take time to keep."""
        del state
        return self.taps

    @abstractmethod
    def observe(self, state: Any, observation: Observation) -> None:
        """Commit what was accepted to the state."""

    def finish(self, state: Any, row: int, tokens: Sequence[int]) -> None:
        """Row ``row`` has ended with these tokens: for drafters that learn across requests. The row leaves after this."""
        del state, row, tokens


class AcceptanceRule(ABC):
    """Walks a scored tree. Pure: draft, law and noise in, verdict out.

    ``walk_row`` is the rule as one reads it in a paper, one row and one question to chance at a time; it is what the
    enumeration proofs run. ``walk`` is the same for a batch, without a loop over rows, tested against it number by number.
    """

    exact_for: ClassVar[tuple[Draws, ...]]
    """Ways of drawing for which the output law is the target's, the preferred one first."""
    shape: ClassVar[Shape]
    """TREE: walks any tree. CHAIN: only chains."""
    lossless: ClassVar[bool]
    keeps_seed: ClassVar[bool] = False
    """The text is plain decoding's with the same seed, token for token, and not only drawn from the same law."""

    @abstractmethod
    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict: ...

    @abstractmethod
    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict: ...


@dataclass(frozen=True, eq=False)
class RowDraft:
    """One row's tree with its laws, as a scalar rule reads it."""

    tokens: list[int]
    parents: list[int]
    p: Tensor
    """[N, V] the target's law after each node, float64."""
    q: Tensor | None
    """[N, V] the law each node's children were drawn from."""
    draws: Draws

    def children(self, node: int) -> list[int]:
        """Children in the order they were drawn."""
        return [child for child in range(1, len(self.tokens)) if self.parents[child] == node]

    def depth(self, node: int) -> int:
        depth = 0
        while node > 0:
            node = self.parents[node]
            depth += 1
        return depth

    @staticmethod
    def of(draft: Draft, law: Law, row: int) -> RowDraft:
        """Row ``row`` of a batched draft and its target law."""
        size = draft.tree.sizes[row]
        tokens, parents = draft.tree.tokens[row, :size].tolist(), draft.tree.parents[row, :size].tolist()
        q = None if draft.q is None else draft.q[row, :size].double().cpu()
        return RowDraft(tokens, parents, law.probs[row, :size].double().cpu(), q, draft.draws)


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
