"""Grammars in captured rounds: the work of the host while the device runs a round.

A round with grammars has three parts: draft, pass, choice. While the device drafts, the host reads the note of the round
before, and so knows each grammar's state at the root. It checks the guesses, replaces them where the grammar forces a text
(jump-forward), and starts the pass. During the pass it computes the tokens allowed after each node. Only the choice waits for
that.

    device   draft n                    pass n                         choice n   draft n + 1 ..
    host     note n - 1, states         masks of n's nodes             note n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import Grammar
from outrider.core.request import RequestState


class CutRound(Protocol):
    """A captured round in parts, whose first part is running."""

    num_guesses: int

    def drafted(self) -> tuple[list[list[int]], list[list[int]]]:
        """Wait for the draft: tokens and parents of every slot's nodes."""
        ...

    def score(self, amended: Mapping[int, Sequence[int]]) -> None:
        """Start the pass, with other guesses for some slots."""
        ...

    def choose(self, masks: Mapping[int, Tensor]) -> None:
        """Start the rest, with packed masks [N, bytes] for some slots."""
        ...


def finish_round(graph: CutRound, states: Mapping[int, RequestState], vocab_size: int) -> None:
    """Run pass and choice of a round whose draft is running. ``states`` are the grammar states of all running slots that have
    one."""
    tokens, parents = graph.drafted()
    followed: dict[int, list[Any]] = {}
    amended: dict[int, list[int]] = {}
    for slot, state in states.items():
        grammar, root = state.params.grammar, state.grammar_state
        assert grammar is not None
        try:
            amended[slot], followed[slot] = follow(grammar, root, tokens[slot], parents[slot])
        except Exception as error:  # ends this request and no other one
            state.fail(error)
    graph.score({slot: nodes for slot, nodes in amended.items() if nodes != tokens[slot]})
    masks: dict[int, Tensor] = {}
    for slot, places in followed.items():
        grammar = states[slot].params.grammar
        assert grammar is not None
        try:
            masks[slot] = packed_masks(grammar, places, vocab_size)
        except Exception as error:
            states[slot].fail(error)
    graph.choose(masks)


def follow(grammar: Grammar, root: Any, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[Any]]:
    """The nodes' tokens with forced text in place of guesses, and the grammar's state at each node (None after a forbidden
    token). Where no guess of a node is allowed but a token is forced, that token becomes the node's first child."""
    guesses, states = list(tokens), [root, *[None] * (len(tokens) - 1)]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], 1):
        children.setdefault(parent, []).append(node)
    runs: dict[int, Sequence[int]] = {}
    for parent in range(len(tokens)):
        state, below = states[parent], children.get(parent, [])
        if state is None or not below:
            continue
        for node in below:
            states[node] = grammar.advance(state, guesses[node]) if guesses[node] >= 0 else None
        if all(states[node] is None for node in below):
            run = runs.get(parent) or grammar.forced(state)
            if run:
                guesses[below[0]], states[below[0]], runs[below[0]] = run[0], grammar.advance(state, run[0]), run[1:]
    return guesses, states


def packed_masks(grammar: Grammar, states: Sequence[Any], vocab_size: int) -> Tensor:
    """[N, bytes] tokens allowed after every node, eight tokens a byte. All bits are set where a node cannot be reached or where
    nothing is allowed. The latter keeps the law valid, and ``emit`` ends the request there."""
    masks = np.full((len(states), -(-vocab_size // 8)), 255, np.uint8)
    for node, state in enumerate(states):
        allowed = None if state is None else grammar.allowed(state, vocab_size)
        if allowed is not None and bool(allowed.any()):
            masks[node] = np.packbits(allowed.numpy(), bitorder="little")
    return torch.from_numpy(masks)
