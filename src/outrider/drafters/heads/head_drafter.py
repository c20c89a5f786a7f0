"""Trees from trained heads: what all kinds of them have in common.

Heads read hidden states that the target computed anyway: those of the prompt when a request starts, those of the accepted nodes
after every round. From the last of them, and the token after it, a tree grows level by level through the same code as a draft
model's. Its shape is static or best-first. Candidates are ranked by log q + g, with the target's noise g (docs/lossless.md,
section 8).

    known at a round:  states of tokens 0 .. n - 2,  tokens 0 .. n - 1 (the last one is the root)      column c: (state c,
    token c + 1)

Lossless under every rule that is exact for the draws: the heads decide only how many guesses are accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.guessing_target import TreeSearch
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.tree import TokenTree
from outrider.drafters.heads.device_growers import device_grower, device_heads, kernels_know
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.pending_states import PendingStates
from outrider.drafters.heads.token_window import TokenWindow
from outrider.drafters.trees.best_first import CandidatePool, grow_pool, useful_width
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.children import LikelyChildren
from outrider.drafters.trees.levels import LevelGrowth
from outrider.drafters.trees.options import BestFirstOptions
from outrider.drafters.trees.shape import TreeShape
from outrider.drafters.trees.static import grow_shape
from outrider.models.heads import Head
from outrider.models.heads.layer import LayerCache
from outrider.models.native.growing import Growing

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory
    from outrider.device.drafters.trees.growers import Grower

MOST_COLUMNS = 512
"""Most columns read in one pass."""


@dataclass
class HeadState(RowState):
    """The heads' cache of each row, and the states they have not read."""

    pending: PendingStates
    """Newest states that the heads have not read. A head without memory needs only the last few."""
    cache: ContiguousCache | None = None
    kept: list[int] | None = None
    """Columns of each row's cache that belong to committed text; None if this round added no drafted ones."""
    window: TokenWindow | None = None
    """The newest tokens, for heads that remember only those."""
    carried: list[Tensor] = field(default_factory=list)
    """The recurrent state after each row's last columns."""
    skipped: list[int] = field(default_factory=list)
    """Columns of each row that were read but are not in the cache, for heads that compress images."""
    deeper: tuple[HeadState, ...] = ()
    """The states of further modules, for heads that are a chain of modules. Each reads the states of the one before."""

    @property
    def num_read(self) -> list[int]:
        """Columns of each row that were read."""
        assert self.cache is not None
        return [length + skip for length, skip in zip(self.cache.lengths, self.skipped or repeat(0))]

    @property
    def modules(self) -> tuple[HeadState, ...]:
        return (self, *self.deeper)

    def fork(self, rows: Sequence[int]) -> HeadState:
        cache = None if self.cache is None else self.cache.fork(rows)
        window = None if self.window is None else self.window.fork(rows)
        deeper = tuple(state.fork(rows) for state in self.deeper)
        carried = [self.carried[row] for row in rows] if self.carried else []
        skipped = [self.skipped[row] for row in rows] if self.skipped else []
        return HeadState(self.pending.fork(rows), cache, window=window, carried=carried, skipped=skipped, deeper=deeper)

    def join(self, other: HeadState) -> HeadState:
        cache = None
        if self.cache is not None:
            assert other.cache is not None
            cache = self.cache.join(other.cache)
        deeper = tuple(mine.join(theirs) for mine, theirs in zip(self.deeper, other.deeper, strict=True))
        window = None if self.window is None or other.window is None else self.window.join(other.window)
        carried, skipped = [*self.carried, *other.carried], [*self.skipped, *other.skipped]
        pending = self.pending.join(other.pending)
        return HeadState(pending, cache, window=window, carried=carried, skipped=skipped, deeper=deeper)


class HeadDrafter(Drafter, ABC):
    """Heads with a way of growing trees."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID)
    shape: ClassVar = Shape.TREE
    num_kept: int = 1
    """Number of newest target states that heads without memory read."""
    in_beams: ClassVar = False
    """Best-first trees hold whole paths."""

    def __init__(
        self,
        head: Head,
        options: HeadOptions | None = None,
        *,
        draws: Draws = Draws.DETERMINISTIC,
        num_layers: int = 1,
    ) -> None:
        """``num_layers`` is the number of layers of the head's cache, if it has one."""
        options = options or HeadOptions()
        self.taps, self._trained = head.config.taps, head
        self.draws = draws
        self.max_depth = head.config.num_depths
        self._bits = options.bits
        self._search = options.search if options.is_best_first and draws is Draws.DETERMINISTIC else None
        self._tree, self._drawing = options.shape.tree, Drawing(draws, options.perturb)
        parameter = next(head.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        layer = head.config.layer
        self._memory = layer and LayerCache(layer, dtype=self._dtype, device=self._device, num_layers=num_layers)

    @property
    def _layer(self) -> LayerCache:
        assert self._memory is not None, "a head of layers"
        return self._memory

    @property
    def static_tree(self) -> TreeShape | None:
        """The tree's shape, if it is fixed and its guesses are ranked with the target's noise; None otherwise."""
        chosen = self.draws is Draws.DETERMINISTIC and self._drawing.perturb
        return self._tree if chosen and self._search is None else None

    @property
    def search(self) -> BestFirstOptions | None:
        """The best-first search, if it ranks candidates with the target's noise; None otherwise."""
        return self._search if self._search is not None and self._search.perturb else None

    def device_twin(self, shape: CapturedShape, target: Target) -> DeviceDrafter | None:
        """The head inside captured rounds, in 16 bits. None if kernels lack its layers or its tree is too large."""
        grower = self._grower(shape.within(self.max_depth), target) if self._bits == 16 else None
        return None if grower is None else self._twin(grower, target)

    def _grower(self, shape: CapturedShape, target: Target) -> Grower | None:
        return device_grower(self._trained, shape, target, static=self.static_tree, search=self.search)

    def _twin(self, grower: Grower, target: Target) -> DeviceDrafter | None:
        can_run = self._memory is None or kernels_know(self._trained)
        memory = self._device_memory(grower.max_depth) if can_run else None
        return None if memory is None else device_heads(self._trained, target, grower, memory)

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        """The head's memory inside captured rounds; None for heads that cannot be part of one."""
        del max_depth
        return None

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        states = [torch.cat([taps[tap][row] for tap in self.taps], -1).to(self._dtype) for row in range(len(rows))]
        if self._memory is None:
            return HeadState(PendingStates(states, self.taps, self.num_kept))
        return HeadState(PendingStates(states, self.taps), self._new_cache(len(rows)))

    def _new_cache(self, batch_size: int) -> ContiguousCache:
        return self._layer.new(batch_size)

    def propose(self, state: HeadState, context: Context, plan: Plan) -> Draft:
        limits = zip(plan.max_depth, plan.max_nodes, strict=True)
        most = max(plan.max_depth) if self.max_depth is None else self.max_depth
        depths = tuple(min(depth, nodes, most) for depth, nodes in limits)
        if not any(depths):
            return context.without_guesses(self.draws)
        plan = plan.clipped(depths)
        tree = self._in_one_call(state, context, plan)
        if tree is not None:
            return Draft(tree, self.draws)
        growth = self._growth(state, context, max(depths))
        if self._search is None:
            return self._trusted(grow_shape(growth, plan, tree=self._tree, drawing=self._drawing)[0], growth, plan)
        search, source = self._search, LikelyChildren(growth, self._search)
        width = self._width(search, plan)
        pool = grow_pool(source, width=width, num_children=search.num_children, max_depth=max(depths))
        return Draft(self._chosen(pool, plan), self.draws)

    def _trusted(self, draft: Draft, growth: LevelGrowth, plan: Plan) -> Draft:
        """The part of a fixed tree to propose. Heads that estimate their confidence propose less."""
        del growth, plan
        return draft

    def _in_one_call(self, state: HeadState, context: Context, plan: Plan) -> TokenTree | None:
        """The tree, grown in one native call. None if the heads cannot be grown so; nothing has changed then."""
        del state, context, plan
        return None

    def _growing(self, context: Context, plan: Plan) -> Growing | None:
        """The options with which a native call grows the plan's tree; None if native code lacks such trees, or such a law."""
        search, sampler, tempering = self._search, context.sampler, context.sampler.tempering
        if search is None or tempering is None or not (search.perturb or sampler.all_greedy):
            return None
        wanted = TreeSearch(self._width(search, plan), search.num_children, search.tau)
        return Growing(wanted, plan, tempering, context.noise, in_beams=self.in_beams)

    def _width(self, search: BestFirstOptions, plan: Plan) -> int:
        """Number of nodes to expand per level."""
        return useful_width(search.width, plan)

    def _chosen(self, pool: CandidatePool, plan: Plan) -> TokenTree:
        """The tree of the best candidates found by the search."""
        return pool.best_tree(plan)[0]

    def observe(self, state: HeadState, observation: Observation) -> None:
        """Drop drafted columns. The accepted nodes' true states are read next time."""
        for module in state.modules:
            if module.cache is not None and module.kept is not None:
                module.cache.truncate(module.kept)
            module.kept = None
        state.pending.note(observation.scores.taps, observation.paths)

    @abstractmethod
    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelGrowth:
        """Read all pending states, and start a tree of at most ``max_depth`` levels at each row's root."""


@dataclass(frozen=True, eq=False)
class NewColumns:
    """Unread columns of every row, padded: (state c, token c + 1)."""

    features: Tensor
    """[B, M, F]"""
    tokens: Tensor
    """[B, M]"""
    sizes: list[int]


def read_columns(state: HeadState, context: Context, *, offset: int = 1, most: int = MOST_COLUMNS) -> list[NewColumns]:
    """Pending states whose tokens are known, in pieces of at most ``most`` columns; marks them as read. Column c goes
    with token c + ``offset``. A row with nothing to read gets one column of zeros, dropped after the round."""
    first = state.num_read
    pending = state.pending.rows
    ready = [min(len(p), len(context.tokens[b]) - offset - first[b]) for b, p in enumerate(pending)]
    rows = [p[:count] if count > 0 else p.new_zeros(1, p.shape[1]) for p, count in zip(pending, ready, strict=True)]
    begins = [length + (offset if count > 0 else 0) for length, count in zip(first, ready, strict=True)]
    tokens = [list(context.tokens[b][begin : begin + len(rows[b])]) for b, begin in enumerate(begins)]
    state.kept = [length + max(0, count) for length, count in zip(first, ready, strict=True)]
    state.pending.drop([max(0, count) for count in ready])
    longest = max(len(row) for row in rows)
    return [_piece(rows, tokens, begin, most, context.device) for begin in range(0, longest, most)]


def read_pending(state: HeadState, pieces: Sequence[NewColumns], read: Callable[[NewColumns, TokenTree], Tensor]) -> Tensor:
    """Read columns piece by piece and commit them. ``read`` receives a piece, and its tokens as chains.

    Returns [B, 1, S], its result for each row's last column.
    """
    assert state.cache is not None
    last = None
    for columns in pieces:
        states = read(columns, TokenTree.chain(columns.tokens, columns.sizes))
        state.cache.commit([range(size) for size in columns.sizes])
        last = newer(last, last_of(states, columns.sizes), columns.sizes)
    assert last is not None
    return last


def newer(old: Tensor | None, new: Tensor, sizes: Sequence[int]) -> Tensor:
    """``new`` [B, ...] for rows that had something to read, else ``old``."""
    if old is None:
        return new
    more = torch.tensor([size > 0 for size in sizes], device=new.device)
    return torch.where(more.view(-1, *[1] * (new.dim() - 1)), new, old)


def newest(state: HeadState, count: int = 1) -> Tensor:
    """[B, count, F] each row's newest states, for heads without a memory; zeros before the first."""
    rows = [torch.nn.functional.pad(p, (0, 0, max(0, count - len(p)), 0))[-count:] for p in state.pending.rows]
    return torch.stack(rows)


def _piece(rows: Sequence[Tensor], tokens: Sequence[Sequence[int]], begin: int, most: int, device: torch.device) -> NewColumns:
    parts = [row[begin : begin + most] for row in rows]
    longest = max(len(part) for part in parts)
    features = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in parts])
    ids = [[*row[begin : begin + most], *[0] * (longest - len(part))] for row, part in zip(tokens, parts, strict=True)]
    return NewColumns(features, torch.tensor(ids, device=device), [len(part) for part in parts])


def last_of(states: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, 1, H] each row's last real state."""
    index = torch.tensor([max(size - 1, 0) for size in sizes], device=states.device)
    return states[torch.arange(len(sizes), device=states.device), index][:, None]
