"""A drafter on the host beside captured rounds. It drafts after a round has ended, and its guesses are input of the next round.

A round with guesses therefore waits for the one before it. Rounds without guesses do not: the device runs ahead, as in plain
decoding. Trees are passed with parents before children, so the first nodes of a tree are a tree too. A captured round takes as
many of them as it has room for. ``Engine.step`` is the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from outrider.core.device_round import CapturedShape, DeviceDrafter, Frame, LateTexts, SlotTrees, Texts
from outrider.core.draft import Draft
from outrider.core.interfaces import AcceptanceRule, Context, Drafter, Observation, Plan, Target
from outrider.core.request import RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import NOTE
from outrider.engine.host_verdicts import path_along, told_rows, verdicts_of
from outrider.models.attention import tree_tiles
from outrider.models.attention.tree_triton import pack_words
from outrider.models.gpu.uploads import sent

if TYPE_CHECKING:
    from outrider.engine.round_graph import RoundGraph

_NOTHING = -1
"""Token of a place without a guess. It never equals a choice of the target."""


@dataclass(frozen=True, eq=False)
class _Given:
    """The latest guesses of every slot, at fixed memory addresses."""

    tokens: Tensor
    """[B, N] int64, the root first; ``_NOTHING`` after the last guess."""
    trees: SlotTrees

    @staticmethod
    def empty(batch_size: int, num_nodes: int, device: torch.device) -> _Given:
        tokens = torch.full((batch_size, num_nodes), _NOTHING, dtype=torch.int64, device=device)
        parents = torch.zeros_like(tokens)
        parents[:, 0] = -1
        return _Given(tokens, _shapes_of(parents))

    def write(self, slots: Sequence[int], tree: TokenTree, *, is_chain: bool) -> None:
        """Write the trees of some slots. The other slots get no guesses."""
        index, count = sent(list(slots), torch.int64, self.tokens.device), tree.num_nodes
        valid = tree.valid
        if is_chain:  # as far as a tree is one
            above = torch.arange(-1, count - 1, device=valid.device)
            valid = valid & (tree.parents == above).cummin(1).values
        self.tokens.fill_(_NOTHING)
        self.tokens[index, :count] = tree.tokens.masked_fill(~valid, _NOTHING)
        if not is_chain:
            parents = torch.zeros_like(self.tokens)
            parents[:, 0] = -1
            parents[index, :count] = tree.parents
            for place, values in zip(vars(self.trees).values(), vars(_shapes_of(parents)).values(), strict=True):
                place.copy_(values)


def _shapes_of(parents: Tensor) -> SlotTrees:
    """The shapes of trees with these parents [B, N], in the form that kernels read."""
    tree = TokenTree(parents, parents, (parents.shape[1],) * len(parents))
    return SlotTrees(parents, tree.depths.int(), pack_words(tree.ancestors), tree_tiles.paths_of(tree.ancestors))


@final
class BetweenRounds(DeviceDrafter):
    """Drafts on the host between captured rounds."""

    least_len = 1

    def __init__(self, drafter: Drafter, shape: CapturedShape, target: Target, rule: AcceptanceRule | None = None) -> None:
        """``rule`` decides on the host; None for the coupled rule, which captured rounds contain."""
        self._drafter, self._shape, self._target, self.rule = drafter, shape, target, rule
        self._is_chain = all(depth == count for depth, count in shape.guesses.items())
        self._slots: list[int] = []
        """Slots whose texts the drafter follows, by row of the drafter's state."""
        self._requests: list[RequestState] = []
        self._state: Any = None
        self._sampler: Sampler | None = None
        self._asked: tuple[Draft, Plan] | None = None
        """The draft for the round in flight."""
        self._noise: Noise | None = None
        self._walked: tuple[list[list[int]], list[bool]] | None = None
        """The rule's accepted paths in it, by row, and whether a guess was rejected at each end; None if the device decided."""
        self._gone: set[int] = set()
        """Slots that were freed while their round was in flight."""
        self._prompts: dict[int, Tensor] = {}
        """[n, F] tapped states of prompts, kept until the drafter starts to follow their slots."""
        self._given: dict[int, _Given] = {}
        self._trees: dict[tuple[int, int], SlotTrees] = {}

    @property
    def version(self) -> int:
        return 0

    @property
    def reads_logits(self) -> bool:
        return self._drafter.reads_logits

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """Target layers whose prompt states the drafter needs, if the prompt was read in passes of its own."""
        return self._drafter.taps

    @property
    def listens(self) -> bool:
        """Whether the logits of the round in flight must be read before the next round overwrites them."""
        return self._asked is not None and self.reads_logits

    def num_nodes(self, depth: int) -> int:
        return 1 + self._shape.guesses[depth]

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        if self._is_chain:
            return None
        if (batch_size, depth) not in self._trees:
            with torch.inference_mode(False):  # whoever asks first, anybody may write to it
                self._trees[batch_size, depth] = _Given.empty(batch_size, self.num_nodes(depth), self._target.device).trees
        return self._trees[batch_size, depth]

    @torch.inference_mode()
    def ready(
        self, states: Mapping[int, RequestState], plan: Plan, depth: int, *, batch_size: int, is_told: bool = False
    ) -> int:
        """Draft for the requests in these slots, at most ``depth`` guesses along a path. Returns how many guesses the round
        needs. ``is_told`` says that a rule on the host decides the round (``tell``)."""
        if self._asked is not None:  # the round was thrown away
            self._asked = self._walked = None
            self._keep([])
        self._follow(states)
        if not self._slots:
            return 0
        draft, asked = self._draft(plan, depth)
        longest = max(draft.num_drafted)
        self._asked = (draft, asked) if longest or self.reads_logits or is_told else None
        if not longest:
            return 0
        self._at(batch_size).write(self._slots, draft.tree, is_chain=self._is_chain)
        return min(length for length in self._shape.guesses if length >= longest) if self._is_chain else depth

    def _draft(self, plan: Plan, depth: int) -> tuple[Draft, Plan]:
        target, rows, device = self._target, self._requests, self._target.device
        assert self._sampler is not None
        room = [max(0, min(row.params.max_tokens - row.num_output, target.max_len - len(row.tokens)) - 1) for row in rows]
        depths, count = tuple(min(plan.max_depth[slot], depth) for slot in self._slots), self._shape.guesses.get(depth, 0)
        asked = replace(plan, max_depth=depths, max_nodes=(count,) * len(rows)).clipped(room)
        seeds = sent([row.seed for row in rows], torch.int64, device)
        positions = sent([row.num_output for row in rows], torch.int64, device)
        noise = self._noise = Noise(seeds, positions, target.gumbel_stream, target.choose)
        context = Context([row.tokens for row in rows], self._sampler, noise, device)
        return self._drafter.asked(self._state, context, asked), asked

    @torch.inference_mode()
    def tell(self, graph: RoundGraph, batch_size: int) -> None:
        """Decide the round whose pass was started, by the rule on the host. The device commits the result."""
        count = graph.num_nodes
        nodes, following = [[-1] * count for _ in range(batch_size)], [[0] * count for _ in range(batch_size)]
        if self._asked is not None and graph.logits is not None and self._sampler is not None:
            draft, noise, sampler = self._asked[0], self._noise, self._sampler
            assert self.rule is not None and noise is not None and draft.tree.num_nodes <= count
            law = sampler.law_of(self._own(graph.logits, draft.tree.num_nodes), draft.tree, noise)
            verdicts = verdicts_of(self.rule, draft, law, noise, all_greedy=sampler.all_greedy)
            self._walked = [[0, *one.path] for one in verdicts], [one.rejected for one in verdicts]
            told = told_rows(draft.tree.tokens.tolist(), self._walked[0], [one.next_token for one in verdicts], count)
            for slot, row in zip(self._slots, told, strict=True):
                nodes[slot], following[slot] = row
        graph.tell(nodes, following)

    def _own(self, logits: Tensor, num_nodes: int) -> Scores:
        """The scores of the slots that the drafter follows, for their first nodes."""
        return Scores(logits[sent(self._slots, torch.int64, logits.device), :num_nodes, : self._target.vocab_size])

    def noted(self, notes: list[list[int]]) -> list[list[int]]:
        """The notes of a round by slot, with what only the rule knows: the number of guesses, and whether one was rejected."""
        if self._asked is not None and self._walked is not None:
            for slot, drafted, rejected in zip(self._slots, self._asked[0].num_drafted, self._walked[1], strict=True):
                notes[slot][1], notes[slot][3] = drafted, rejected
        return notes

    @torch.inference_mode()
    def took(self, notes: Mapping[int, Sequence[int]], logits: Tensor | None) -> None:
        """Update the drafter after the round that it drafted for. ``logits`` [B, N, V] are given where the drafter reads
        them."""
        (asked, self._asked), (walked, self._walked) = (self._asked, None), (self._walked, None)
        if asked is None:
            return
        (draft, plan), tree = asked, asked[0].tree
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        taken = [notes[slot][NOTE:][: notes[slot][2]] if slot in notes else () for slot in self._slots]
        paths = [path_along(*row) for row in zip(tokens, parents, tree.sizes, taken, strict=True)]
        if walked is not None:
            paths = walked[0]
        scores = torch.zeros(0)
        if logits is not None:
            scores = logits.new_zeros(len(paths), tree.num_nodes, self._target.vocab_size)
            own = logits[sent(self._slots, torch.int64, logits.device), : tree.num_nodes, : self._target.vocab_size]
            scores[:, : own.shape[1]] = own
        accepted = [len(path) - 1 for path in paths]
        self._drafter.observe(self._state, Observation(draft, Scores(scores), paths, accepted, 0.0, 0.0, plan))
        self._keep([row for row, slot in enumerate(self._slots) if slot not in self._gone])
        self._gone.clear()

    def finish(self, states: Mapping[int, RequestState]) -> None:
        """Tell drafters that learn across requests that these requests have ended."""
        if self._drafter.memories:
            self._follow({slot: self._requests[row] for row, slot in enumerate(self._slots)} | dict(states))
        for slot, state in states.items():
            if slot in self._slots:
                self._drafter.finish(self._state, self._slots.index(slot), state.tokens)

    def _follow(self, states: Mapping[int, RequestState]) -> None:
        """Follow these requests and no others."""
        self._keep([row for row, slot in enumerate(self._slots) if slot in states])
        fresh = [slot for slot in states if slot not in self._slots]
        if fresh:
            prompts = [states[slot].tokens[: len(states[slot].request.prompt_ids)] for slot in fresh]
            begun = self._drafter.start(prompts, self._tapped(fresh))
            self._state = begun if not self._slots else self._state.join(begun)
            self._slots, self._requests = [*self._slots, *fresh], [*self._requests, *(states[slot] for slot in fresh)]
            self._sampler = Sampler(self._requests, self._target.vocab_size, self._target.device)

    def _tapped(self, slots: Sequence[int]) -> dict[int, list[Tensor]]:
        """The tapped states of the prompts; None unless they are known for all of them."""
        known = [self._prompts.pop(slot, None) for slot in slots]
        found, taps = [one for one in known if one is not None], self.prompt_taps
        if len(found) < len(slots) or not taps:
            return {}
        parts = [one.chunk(len(taps), dim=-1) for one in found]
        return {tap: [part[number] for part in parts] for number, tap in enumerate(taps)}

    def _keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self._slots):
            self._slots, self._requests = [self._slots[row] for row in rows], [self._requests[row] for row in rows]
            self._state = self._state.fork(rows) if rows else None
            self._sampler = Sampler(self._requests, self._target.vocab_size, self._target.device) if rows else None

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        given, count = self._at(frame.batch_size), nodes.shape[1]
        nodes[:, 1:] = given.tokens[:, 1:count]
        shapes = self.trees(frame.batch_size, depth)
        if shapes is not None:  # what reaches further than this round is left out
            nodes[:, 1:].masked_fill_(given.trees.depths[:, 1:count] > depth, _NOTHING)
            for place, values in zip(vars(shapes).values(), vars(given.trees).values(), strict=True):
                place.copy_(values[:, :count, : place.shape[2]] if place.dim() == 3 else values[:, :count])

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        self.release(texts.slots, batch_size=batch_size)
        self._prompts |= dict(zip(texts.slots, texts.features or (), strict=False))

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        self.release(slots, batch_size=batch_size)

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        """Let the drafter read committed tokens that it has not seen yet."""
        del late, batch_size

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        del old_size, new_size
        places = {old: new for new, old in enumerate(slots)}
        self._keep([row for row, slot in enumerate(self._slots) if slot in places])
        self._slots = [places[slot] for slot in self._slots]
        self._prompts = {places[slot]: one for slot, one in self._prompts.items() if slot in places}

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        del batch_size
        gone = set(slots)
        self._prompts = {slot: one for slot, one in self._prompts.items() if slot not in gone}
        if self._asked is None:
            self._keep([row for row, slot in enumerate(self._slots) if slot not in gone])
        else:  # the drafter is told of the round first
            self._gone |= gone

    def fits(self, capacity: int) -> bool:
        del capacity
        return True

    def _at(self, batch_size: int) -> _Given:
        if batch_size not in self._given:
            with torch.inference_mode(False):
                num_nodes = 1 + max(self._shape.guesses.values(), default=0)
                self._given[batch_size] = _Given.empty(batch_size, num_nodes, self._target.device)
        return self._given[batch_size]
