"""Texts written by a target, with its states, from which a probe learns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.api import LLM
from outrider.bench.surplus.probe import Readout, TextWithStates
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.models.heads.embedding_and_output import read_target


def own_texts(
    llm: LLM, prompts: Sequence[list[int]], *, num_texts: int, num_tokens: int, temperature: float
) -> list[list[int]]:
    """Continuations of the prompts, each with a seed of its own, without the prompts."""
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(num_texts)
    ]
    chosen = [prompts[place % len(prompts)] for place in range(num_texts)]
    return [[*out.prompt_token_ids, *out.token_ids] for out in llm.generate(chosen, params, method="plain")]


@torch.inference_mode()
def sample_of(target: Target, tokens: Sequence[int]) -> TextWithStates:
    """A text with the last layer's output at every place, and the target's greedy token after it."""
    states = target.prefill([list(tokens)], target.new_cache(1), taps=[target.num_layers])[target.num_layers][0]
    choices = target.logits(states).argmax(-1)
    return TextWithStates(states.float().cpu().clone(), torch.tensor(list(tokens)), choices.cpu().clone())


def readout_of(name: str) -> Readout:
    """The target's own matrices, with its final norm folded into the output."""
    _, ends = read_target(name)
    return Readout(ends.embedding, ends.readout * ends.norm)
