"""Runs that keep the target's logits of every output position, from the pass that decided it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.api import LLM
from outrider.bench.decode import Watcher, decode
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree


@dataclass
class Trace:
    """A text and the raw logits behind each of its tokens."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """[V] float32 at every output position. There may be more than tokens, if an accepted run was cut."""


def trace(llm: LLM, method: Method, prompt: Sequence[int], params: SamplingParams, *, watcher: Watcher | None = None) -> Trace:
    """The trace of one request that runs alone."""
    found = Trace()

    def watch(report: RoundReport) -> None:
        seen = report.seen
        found.logits += list(seen.scores.logits[0, list(seen.paths[0])].float().cpu())
        if watcher is not None:
            watcher(report)

    found.tokens = decode(llm, method, [prompt], [params], watcher=watch, traced=True).outputs[0]
    return found


def wide_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int], *, width: int = 16) -> list[Tensor]:
    """The logits of the same positions, scored in chains of ``width`` nodes from a fresh cache, without drafter, tree or
    rule."""
    text, start = [*prompt, *tokens], len(prompt) - 1
    cache = target.new_cache(1)
    target.prefill([text[:start]], cache)
    found: list[Tensor] = []
    while len(found) < len(tokens):
        nodes = text[start + len(found) : start + min(len(found) + width, len(tokens))]
        chain = TokenTree.chain(torch.tensor([nodes], device=target.device))
        found += list(target.score(chain, cache).logits[0].float().cpu().clone())
        cache.commit([range(len(nodes))])
    return found


def choice_scores(logits: Tensor, position: int, params: SamplingParams) -> Tensor:
    """[V] values whose argmax is the target's choice at an output position, with its noise if there is any."""
    state = RequestState.of(Request([0], params))
    sampler = Sampler([state], len(logits), torch.device("cpu"))
    tree = TokenTree.chain(torch.zeros(1, 1, dtype=torch.int64))
    noise = Noise(torch.tensor([state.seed]), torch.tensor([position]))
    law = sampler.law(logits[None, None], tree, noise)
    return (law.adjusted if params.temperature == 0 else law.perturbed)[0, 0]


def law_at(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] float64 the target's law at a position, from its raw logits, without penalties."""
    state = RequestState.of(Request([0], params))
    sampler = Sampler([state], len(logits), torch.device("cpu"))
    tree = TokenTree.chain(torch.zeros(1, 1, dtype=torch.int64))
    noise = Noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return sampler.law(logits[None, None].double(), tree, noise).probs[0, 0]
