"""The only place where logits become a distribution.

``Sampler`` applies a request's parameters to the logits of every node of its tree, conditioned on that node's path. The
penalties count the tokens on the path, the minimum length looks at the node's own output position, and the grammar is advanced
along the path. So p is the same whether a position is reached by one-token decoding, by a chain or by a branch, and every
parameter is exact under speculation. Nothing depends on the other rows of the batch.

Truncations (top-k, top-p, min-p) are thresholds on the logit: ties at the threshold are kept, whatever the sort order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.penalties import Penalties, is_penalised
from outrider.core.request import RequestState
from outrider.core.rng import Chosen, Noise, Purpose
from outrider.core.scores import Scores
from outrider.core.tempering import Cut, Minimum, Tempering
from outrider.core.tree import TokenTree
from outrider.core.truncation import min_p, top_k, top_p, typical_p
from outrider.core.verdict import RowVerdict

Choose = Callable[[], Chosen]
"""A target's own choices, made when they are first read."""


class Law:
    """The distribution after each of M nodes: the same class for the target (p) and for a drafter (q)."""

    def __init__(
        self,
        adjusted: Tensor | Callable[[], Tensor],
        sampler: Sampler,
        tree: TokenTree,
        noise: Noise,
        *,
        start: int = 0,
        choose: Choose | None = None,
    ) -> None:
        """``adjusted`` may be a function, called on first use. ``choose`` returns choices without it, and leaves open ones to
        this law."""
        self._adjusted, self._choose = adjusted, choose
        self._sampler = sampler
        self._tree = tree
        self._noise = noise
        self._start = start

    @cached_property
    def adjusted(self) -> Tensor:
        """[B, M, V] logits after all steps that can change their order."""
        return self._adjusted() if callable(self._adjusted) else self._adjusted

    @cached_property
    def logits(self) -> Tensor:
        """[B, M, V] unnormalised log-probabilities of the law, -inf outside its support."""
        return self._sampler.temper(self.adjusted)

    @cached_property
    def probs(self) -> Tensor:
        """[B, M, V] probabilities."""
        return torch.softmax(self.logits, -1)

    @cached_property
    def choices(self) -> Tensor:
        """[B, M] Gumbel-max draw with the noise of each node's output position; the argmax where temperature is 0."""
        chosen = self._chosen
        if chosen is None:
            return self._own_choices()
        return torch.where(chosen.tokens < 0, self._own_choices(), chosen.tokens) if chosen.num_open else chosen.tokens

    @property
    def walks(self) -> Sequence[RowVerdict] | None:
        """The walk of each row along ``choices``, if the target's own code has made it."""
        return None if self._chosen is None else self._chosen.walks

    @cached_property
    def _chosen(self) -> Chosen | None:
        return None if self._choose is None else self._choose()

    def _own_choices(self) -> Tensor:
        return (self.adjusted if self._sampler.all_greedy else self.perturbed).argmax(-1)

    @cached_property
    def perturbed(self) -> Tensor:
        """[B, M, V] logits + target noise: the ranking by which a coupled drafter picks siblings."""
        depths = self._tree.depths[:, self._start :]
        return self.logits + self._noise.target_gumbel(depths, self.adjusted.shape[-1])

    def draw(self, lanes: Tensor) -> Tensor:
        """[B, M] draws with the round's own noise, independent of the target's; ``lanes`` [B, M] names the streams."""
        gumbel = self._noise.gumbel(Purpose.DRAFT, lanes, self.adjusted.shape[-1])
        return (self.logits + gumbel).argmax(-1)


class Sampler:
    """The sampling parameters of B requests as tensors, with the token counts for their penalties."""

    def __init__(self, rows: Sequence[RequestState], vocab_size: int, device: torch.device) -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size
        self.device = device
        params = [row.params for row in rows]
        self.all_greedy = all(p.temperature == 0 for p in params)
        self._temperature = self._column([p.temperature for p in params])
        self._top_k = self._column([min(p.top_k or vocab_size, vocab_size) for p in params], torch.int64)
        self._top_p = self._column([p.top_p for p in params], torch.float64)  # 1 - p must be rounded once, not twice
        self._min_p = self._column([p.min_p for p in params])
        self._typical_p = self._column([p.typical_p for p in params])
        self._uses_top_k = any(p.top_k for p in params)
        self._uses_top_p = any(p.top_p < 1 for p in params)
        self._uses_min_p = any(p.min_p > 0 for p in params)
        self._uses_typical = any(p.typical_p < 1 for p in params)
        self._bias = self._static_bias()
        self._ends = self._end_mask() if any(p.min_tokens for p in params) else None
        is_any_penalised = any(is_penalised(row) for row in rows)
        self._penalties = Penalties(self.rows, vocab_size, device) if is_any_penalised else None
        self._has_processors = any(p.logits_processors for p in params)
        self._per_node = [i for i, p in enumerate(params) if p.grammar or p.logits_processors]

    @cached_property
    def seeds(self) -> Tensor:
        """[B] int64."""
        return torch.tensor([row.seed for row in self.rows], device=self.device)

    @property
    def tempering(self) -> Tempering | None:
        """The rows' sampling parameters as plain values; None if a grammar or a user's function is needed."""
        return None if self._per_node else self._tempering()

    def law(self, logits: Tensor, tree: TokenTree, noise: Noise, *, start: int = 0) -> Law:
        """The law after nodes ``start``.. of the tree, from their raw logits [B, N - start, V]."""
        if noise.choose is None or self._has_processors or logits.dtype != torch.float32:
            return Law(self.adjust(logits, tree, start=start), self, tree, noise, start=start)
        adjusted, choose = partial(self.adjust, logits, tree, start=start), partial(self._chosen, logits, tree, noise, start)
        return Law(adjusted, self, tree, noise, start=start, choose=choose)

    def law_of(self, scores: Scores, tree: TokenTree, noise: Noise) -> Law:
        """The law from the scores of a pass. The logits are read only if more than a temperature shapes them."""
        tempering, choose = self.tempering, scores.choose
        if choose is None or tempering is None or not tempering.is_plain:
            return self.law(scores.logits, tree, noise)
        depths = None if self.all_greedy else tree.depths
        elsewhere = partial(choose, tempering.temperatures, noise, depths)
        return Law(lambda: self.adjust(scores.logits, tree), self, tree, noise, choose=lambda: Chosen(elsewhere()))

    def _chosen(self, logits: Tensor, tree: TokenTree, noise: Noise, start: int) -> Chosen:
        """The choices of ``law``, computed by the target's own code."""
        assert noise.choose is not None
        masks = {(i, node): mask for i in self._per_node for node, mask in self._masks(tree, i, start).items()}
        logits = logits[..., : self.vocab_size]
        return noise.choose(logits, self._tempering(), noise=noise, tree=tree, start=start, masks=masks)

    def _tempering(self) -> Tempering:
        """All parameters but grammars and processors."""
        tempering = self._still
        if self._ends is not None:
            tempering = replace(tempering, minimum=Minimum(self._missing(), self._ends))
        return tempering if self._penalties is None else replace(tempering, counted=self._penalties.counted())

    @cached_property
    def _still(self) -> Tempering:
        """The parameters that do not change as texts grow."""
        params = [row.params for row in self.rows]
        is_cut = self._uses_top_k or self._uses_top_p or self._uses_min_p or self._uses_typical
        cuts = [Cut(p.top_k or 0, p.top_p, p.min_p, p.typical_p) for p in params] if is_cut else None
        bias = None if self._bias is None else self._bias[:, 0]
        return Tempering([p.temperature for p in params], cuts, bias)

    def adjust(self, logits: Tensor, tree: TokenTree, *, start: int = 0) -> Tensor:
        """All steps that can change which token is the largest."""
        logits = logits[..., : self.vocab_size]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._per_node:
            logits = self._process_nodes(logits, tree, start)
        if self._bias is not None:
            logits = logits + self._bias
        if self._ends is not None:
            logits = logits.masked_fill(self._too_early(tree, start)[..., None] & self._ends[:, None], -torch.inf)
        if self._penalties is not None:
            logits = self._penalties.apply(logits, tree, start)
        return logits

    def temper(self, logits: Tensor) -> Tensor:
        """Temperature and truncation; greedy rows become a point mass."""
        if self.all_greedy:
            return _point_mass(logits)
        greedy = self._temperature == 0
        tempered = logits / torch.where(greedy, 1.0, self._temperature)
        if self._uses_top_k:
            tempered = top_k(tempered, self._top_k)
        if self._uses_top_p:
            tempered = top_p(tempered, self._top_p)
        if self._uses_min_p:
            tempered = min_p(tempered, self._min_p)
        if self._uses_typical:
            tempered = typical_p(tempered, self._typical_p)
        return torch.where(greedy, _point_mass(logits), tempered) if bool(greedy.any()) else tempered

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, 1, 1] a column that broadcasts over nodes and vocabulary."""
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None, None]

    def _static_bias(self) -> Tensor | None:
        if not any(row.params.logit_bias or row.params.banned_token_ids for row in self.rows):
            return None
        bias = torch.stack([bias_of(row.params, self.vocab_size) for row in self.rows])[:, None]
        return bias.to(self.device)

    def _end_mask(self) -> Tensor:
        """[B, V] true for the tokens that end a row's text."""
        mask = torch.zeros(len(self.rows), self.vocab_size, dtype=torch.bool)
        for i, row in enumerate(self.rows):
            mask[i, sorted(row.request.end_ids)] = True
        return mask.to(self.device)

    def _too_early(self, tree: TokenTree, start: int) -> Tensor:
        """[B, M] true where the next token would come before the row's minimum."""
        return tree.depths[:, start:] < self._missing()[:, None]

    def _missing(self) -> Tensor:
        """[B] tokens until a row may end."""
        return torch.tensor([row.params.min_tokens - row.num_output for row in self.rows], device=self.device)

    def _process_nodes(self, logits: Tensor, tree: TokenTree, start: int) -> Tensor:
        """Apply user processors and grammars node by node, since they are arbitrary functions of the path."""
        logits = logits.clone()
        for i in self._per_node:
            self._process_row(logits[i], tree, i, start)
            for node, allowed in self._masks(tree, i, start).items():
                logits[i, node - start].masked_fill_(~allowed.to(logits.device), -torch.inf)
        return logits

    def _process_row(self, logits: Tensor, tree: TokenTree, i: int, start: int) -> None:
        """Change the logits [M, V] of one row in place."""
        row, tokens = self.rows[i], tree.tokens[i].tolist()
        try:
            for node in range(start, tree.sizes[i]) if row.params.logits_processors else ():
                path = [tokens[n] for n in tree.path(i, node)]
                for processor in row.params.logits_processors:
                    logits[node - start] = processor([*row.tokens, *path], logits[node - start])
        except Exception as error:  # of this request's own processor: the others of the batch go on
            row.fail(error)

    def _masks(self, tree: TokenTree, i: int, start: int) -> dict[int, Tensor]:
        """[V] boolean for the nodes of a row: what its grammar allows there."""
        row = self.rows[i]
        try:
            states = _grammar_states(row, tree, i) if row.params.grammar else {}
            found = {
                node: row.params.grammar.allowed(state, self.vocab_size)
                for node, state in states.items()
                if row.params.grammar and node >= start and state is not None
            }
        except Exception as error:  # of this request's own grammar
            row.fail(error)
            return {}
        # A dead end keeps its logits, so that p is a law; ``emit`` ends the request there.
        return {node: allowed for node, allowed in found.items() if bool(allowed.any())}


def bias_of(params: SamplingParams, vocab_size: int) -> Tensor:
    """[V] what is added to a request's logits: -inf bans a token, and bans all others where one is forced."""
    bias, forced = torch.zeros(vocab_size), params.forced_token_ids
    if forced:  # a mask, and not a sum: an infinite logit has no ratios to others
        bias.fill_(-torch.inf)
        bias[forced] = 0.0
    for token, value in () if forced else params.logit_bias.items():
        bias[token] = value
    for token in params.banned_token_ids:
        bias[token] = -torch.inf
    return bias


def _grammar_states(row: RequestState, tree: TokenTree, index: int) -> dict[int, object]:
    """Grammar state at every node; None below a token the grammar forbids (such a node can never be accepted)."""
    assert row.params.grammar is not None
    tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
    states: dict[int, object] = {0: row.grammar_state}
    for node in range(1, tree.sizes[index]):
        above = states[parents[node]]
        states[node] = None if above is None else row.params.grammar.advance(above, tokens[node])
    return states


def _point_mass(logits: Tensor) -> Tensor:
    """0 at the largest logit, -inf elsewhere."""
    mass = torch.full_like(logits, -torch.inf)
    return mass.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
