"""Beam search, plain and speculative: the same beams, fewer target passes.

The search keeps the ``num_beams`` likeliest unfinished texts; each level scores every token after every beam and keeps the
best. Here a ``Forest`` guesses a tree under every beam, and the target scores all of them in one pass (a row per beam). The
levels are then *replayed* from its log-probabilities. While all winners of a level are nodes of the trees, the next level needs
no new pass. Otherwise the winners are the new beams, and trees are guessed again. Every pass decides at least one level. The
kept texts never depend on the guesses, so the result is that of plain beam search.

    score(beam v) = score(beam) + log p(v | beam);     finished: score / length ^ length_penalty

Length penalty and early stopping are those of ``generate(num_beams=n, do_sample=False)`` in transformers. The search is
deterministic, and lossless up to rounding: a near tie may be decided differently. It takes one prompt at a time, and no
penalties, grammars or other sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.core.errors import OptionError, RequestError
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.engine.beam_forest import Beams, Forest, NoForest


@dataclass(frozen=True)
class BeamOptions:
    """Options of a beam search."""

    num_beams: int = 4
    max_tokens: int = 128
    length_penalty: float = 1.0
    """Exponent of the length by which the score of a finished text is divided. Values above 0 favour long texts, below 0 short
    ones."""
    early_stopping: bool | Literal["never"] = False
    """True: stop when ``num_beams`` texts are finished. False: when no running beam looks better at its present length.
    "never": when none can become better at any length."""

    def __post_init__(self) -> None:
        if self.num_beams < 1 or self.max_tokens < 1:
            raise OptionError(f"num_beams = {self.num_beams}, max_tokens = {self.max_tokens} are not valid; use at least 1")
        if self.early_stopping not in (True, False, "never"):
            raise OptionError(f"early_stopping = {self.early_stopping!r} is not valid; use True, False or 'never'")


@dataclass(frozen=True)
class Hypothesis:
    """A finished text."""

    token_ids: tuple[int, ...]
    score: float
    """Log-probability over length ^ length_penalty."""


@dataclass(eq=False)
class BeamResult:
    """The best texts found, best first, and what they cost."""

    hypotheses: list[Hypothesis] = field(default_factory=list)
    num_passes: int = 0
    """Target passes after the prefill; plain search takes one per level."""
    num_levels: int = 0
    num_nodes: int = 0
    """Tokens the target scored."""


@dataclass(frozen=True)
class _Winner:
    beam: int
    """Number of the beam that it continues."""
    token: int


class _Search:
    """The search without passes: it takes the log-probabilities of one level and returns the winners."""

    def __init__(self, options: BeamOptions, end_ids: frozenset[int]) -> None:
        self.options = options
        self.end_ids = end_ids
        self.outputs: list[tuple[int, ...]] = [()]
        self.scores = torch.zeros(1)
        self.finished: list[Hypothesis] = []
        self.num_levels = 0
        self.is_done = False

    @property
    def num_tokens(self) -> int:
        return len(self.outputs[0])

    def level(self, log_probs: Tensor) -> list[_Winner]:
        """Take one level from [R, V] log-probabilities after every beam; returns the new beams, best first."""
        options, vocab_size = self.options, log_probs.shape[-1]
        self.num_levels += 1
        total = (log_probs + self.scores.to(log_probs.device)[:, None]).flatten()
        # As many candidates as could end, and num_beams more, so that enough are left to go on.
        count = max(2, 1 + len(self.end_ids)) * options.num_beams
        best = total.topk(min(count, len(total)))
        ranked, values = [_Winner(*divmod(index, vocab_size)) for index in best.indices.tolist()], best.values.tolist()
        is_last = self.num_tokens + 1 >= options.max_tokens
        ends = [is_last or winner.token in self.end_ids for winner in ranked]
        texts = [(*self.outputs[winner.beam], winner.token) for winner in ranked]
        self._finish([(texts[i], values[i]) for i in range(min(options.num_beams, len(ranked))) if ends[i]])
        running = [i for i, end in enumerate(ends) if not end][: options.num_beams]
        if running:
            self.outputs, self.scores = [texts[i] for i in running], best.values[running].cpu()
        self.is_done = not running or not self._can_improve()
        return [ranked[i] for i in running]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.options.num_beams

    def _finish(self, ended: Sequence[tuple[tuple[int, ...], float]]) -> None:
        """Add finished texts. Only candidates among the ``num_beams`` best count, and of all finished texts the best are
        kept."""
        if self._is_full and self.options.early_stopping is True:
            return
        new = [Hypothesis(text, score / len(text) ** self.options.length_penalty) for text, score in ended]
        ranked = sorted([*self.finished, *new], key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self.options.num_beams]

    def _can_improve(self) -> bool:
        options = self.options
        if not self._is_full:
            return True
        if options.early_stopping is True:
            return False
        at_best = options.early_stopping == "never" and options.length_penalty > 0
        length = options.max_tokens if at_best else self.num_tokens
        return float(self.scores[0]) / length**options.length_penalty > self.finished[-1].score


@torch.inference_mode()
def beam_search(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    options: BeamOptions,
    end_ids: frozenset[int] = frozenset(),
    forest: Forest | None = None,
) -> BeamResult:
    """The ``num_beams`` best continuations of one prompt; ``forest`` makes it faster and changes nothing else."""
    room = target.max_len - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise RequestError(f"the prompt has {len(prompt_ids)} tokens; give 1 to {target.max_len - 1} for beam search")
    forest = forest or NoForest()
    options = BeamOptions(options.num_beams, min(options.max_tokens, room), options.length_penalty, options.early_stopping)
    search, result, cache = _Search(options, end_ids), BeamResult(), target.new_cache(1)
    target.prefill([list(prompt_ids)[:-1]], cache)
    state = forest.start(prompt_ids)
    while not search.is_done:
        tokens = [[*prompt_ids, *output] for output in search.outputs]
        beams = Beams(tokens, search.scores.to(target.device), end_ids, target.vocab_size, target.device)
        tree = forest.propose(state, beams, options.max_tokens - search.num_tokens - 1)
        scores = target.score(tree, cache)
        rows, paths = _replay(search, tree, scores.logits[..., : target.vocab_size])
        result.num_passes += 1
        result.num_nodes += sum(tree.sizes)
        if not search.is_done:
            cache = cache.fork(rows)
            cache.commit(paths)
            state = forest.keep(state, rows, paths, scores)
    result.hypotheses, result.num_levels = search.finished, search.num_levels
    return result


def _replay(search: _Search, tree: TokenTree, logits: Tensor) -> tuple[list[int], list[list[int]]]:
    """Run levels of the search as long as all its beams are nodes of the trees.

    For every new beam, returns the row it grew from and its nodes there, the root first and without its last token."""
    children = _children(tree)
    rows, paths = list(range(tree.batch_size)), [[0] for _ in range(tree.batch_size)]
    while True:
        ends = [path[-1] for path in paths]
        winners = search.level(logits[rows, ends].float().log_softmax(-1))
        rows, paths = [rows[winner.beam] for winner in winners], [paths[winner.beam] for winner in winners]
        steps = zip(rows, paths, winners, strict=True)
        nodes = [children.get((row, path[-1], winner.token)) for row, path, winner in steps]
        if search.is_done or not all(nodes):
            return rows, paths
        paths = [[*path, node] for path, node in zip(paths, nodes, strict=True) if node is not None]


def _children(tree: TokenTree) -> dict[tuple[int, int, int], int]:
    """Maps (row, node, token) to the child of the node that holds the token; of several such children, to the first."""
    found: dict[tuple[int, int, int], int] = {}
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        for node in range(1, tree.sizes[row]):
            found.setdefault((row, parents[node], tokens[node]), node)
    return found
