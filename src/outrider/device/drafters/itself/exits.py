"""Drafting with part of the target inside a captured round: its first layers, or all but a few sublayers.

A partial pass reads the target's pages and writes the keys of the guesses after the text, in the layers that it takes. The
verifying pass of the same round overwrites them, with the same numbers if the first layers draft. So the drafter has no memory
of its own, and never has to catch up. The oracles are ``drafters/itself/self_chain.py`` and ``self_growth.py``.

    pages:   text .. | root | guess 1 | guess 2 ..          draft: layers of the route          verification: all layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from torch import Tensor

from outrider.core.device_round import DeviceDrafter, Frame, LateTexts, SlotTrees, Texts
from outrider.core.route import Route
from outrider.device.drafters.heads.memory import HeadColumns, LayerMemory, Roots
from outrider.device.drafters.trees.growers import Answers, Asked, Grower
from outrider.models.adapter import Adapter
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.heads.layer import Rotations


@final
class DeviceExit(DeviceDrafter):
    """Chains or trees from the sublayers of a route."""

    text_sizes: Sequence[int] = ()

    def __init__(self, target: FastDecoder, route: Route, grower: Grower) -> None:
        self._target, self._route, self._grower, self.max_depth = target, route, grower, grower.max_depth

    @property
    def version(self) -> int:
        return 0

    def num_nodes(self, depth: int) -> int:
        return self._grower.num_nodes(depth)

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        return self._grower.trees(batch_size, depth)

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        self._grower.grow(ExitAnswers(self._target, self._route, frame, nodes[:, :1]), frame, nodes, depth)

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        """Nothing to do: the target has read the text."""

    def open(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Nothing to do: the target reads the text."""

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        """Nothing to do: every round is the target's own."""

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """Nothing to do: the target's pages move."""

    def release(self, slots: Sequence[int], *, batch_size: int) -> None:
        """Nothing to do: the pages are the target's."""

    def fits(self, capacity: int) -> bool:
        return capacity <= self._target.most_slots


Adapt = Callable[[Tensor, int, Sights], Tensor]
"""Turns states of nodes into [B, M, H] input of the target's norm and head, given how far after the root they begin and which
nodes they see."""


@final
class ExitAnswers(Answers):
    """Answers of one round. The root comes before the nodes that are asked about."""

    def __init__(self, target: FastDecoder, route: Route, frame: Frame, roots: Tensor, *, adapt: Adapt | None = None) -> None:
        """``roots`` [B, 1]. The states of the route are used as they are, unless ``adapt`` changes them."""
        self._target, self._route, self._frame, self._roots = target, route, frame, roots
        self._adapt: Adapt = adapt or (lambda states, *_: states)

    def root(self) -> Tensor:
        states = self._states(self._roots, self._frame.lengths - 1, Sights(None, None))
        return self._target.logits(self._adapt(states, 0, Sights(None, None)))

    def below(self, asked: Asked) -> Tensor:
        states = self._states(asked.tokens, self._frame.lengths, asked.sights)
        return self._target.logits(self._adapt(states, 1, asked.sights))

    def _states(self, tokens: Tensor, lengths: Tensor, sights: Sights) -> Tensor:
        """[B, M, H] states of nodes [B, M], which follow texts of [B] tokens."""
        assert self._frame.pages is not None, "the target keeps texts in pages"
        target, rows = self._target, Rows(lengths.int(), self._frame.pages, self._target.page_len)
        step = target.step((len(tokens), tokens.shape[1]), rows, sights, num_slots=target.num_slots)
        hidden, _ = target.hidden(tokens.contiguous(), step, route=self._route)
        return hidden.view(*tokens.shape, -1)


@final
class AdapterMemory(LayerMemory):
    """A layer between an exit and the target's norm and head. It stores keys and values of the exit's states of a text."""

    width = 0

    def __init__(self, adapter: Adapter, target: FastDecoder, route: Route) -> None:
        super().__init__(adapter, adapter.config, Rotations(adapter.config), num_layers=1)
        self._adapter, self._target, self._route = adapter, target, route

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        self._adapter.layer(features, self._attending(batch_size, columns)[0])
        return features[..., :0]

    def answers(self, roots: Roots) -> Answers:
        adapt = partial(self._adapted, roots)
        return ExitAnswers(self._target, self._route, roots.frame, roots.tokens, adapt=adapt)

    def _adapted(self, roots: Roots, states: Tensor, behind: int, sights: Sights) -> Tensor:
        """[B, M, H] adapted states of nodes that begin ``behind`` the root."""
        columns = roots.columns(roots.num_columns + behind, states.shape[1])
        attending = self._attending(len(states), columns, sights)[0]
        return self._adapter.layer(states.to(self._like.dtype), attending).to(states.dtype)
