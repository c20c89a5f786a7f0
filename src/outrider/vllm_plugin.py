"""Our copying drafters inside vLLM, as proposers of its ``custom_class`` method. Nothing of vLLM is imported here.

    vllm serve MODEL --speculative-config
        '{"method": "custom_class", "model": "outrider.vllm_plugin.Suffix", "num_speculative_tokens": 8}'

vLLM names the class by its path, makes it with its config, and calls ``propose`` after every step with the tokens of every
slot of its batch. It does not say which request sits in a slot, and moves requests between slots. So a request is recognised
by its tokens: a state belongs to the slot whose text goes on where the state's text ends, and how it goes on says which guesses
were right. vLLM checks guesses by its own rule;
what is written stays what vLLM would write without. Options of the method come as JSON in ``OUTRIDER_VLLM_OPTIONS``.
"""

from __future__ import annotations

import json
import os
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from outrider.core.draft import Draft
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.method_rows import names_in
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.methods import compose
from outrider.models.tiny import TableModel

OPTIONS_VARIABLE = "OUTRIDER_VLLM_OPTIONS"
COPYING = ("suffix", "prompt-lookup", "ngram-cache", "reference")
"""Methods that need nothing but tokens."""
_HYBRID = "hybrid"
_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Slot:
    """A request of vLLM's batch."""

    tokens: list[int]
    state: Any
    sampler: Sampler
    asked: tuple[Draft, Plan] | None = None
    """What was guessed after these tokens."""

    def is_continued_by(self, tokens: Sequence[int]) -> bool:
        size = len(self.tokens)
        return size <= len(tokens) and list(tokens[:size]) == self.tokens


@final
class SlotDrafting:
    """A copying drafter for the slots of a batch that somebody else runs."""

    def __init__(self, method: str, *, vocab_size: int, num_guesses: int, options: Mapping[str, Any] | None = None) -> None:
        given: dict[str, Any] = {**(options or {}), "num_draft_tokens": num_guesses}
        if method == _HYBRID:
            given = {"parts": COPYING[:1] + COPYING[2:3], **given, "num_tree_nodes": num_guesses}
        for name in names_in(given["parts"]) if method == _HYBRID else (method,):
            if name not in COPYING:
                raise OptionError(
                    f"a proposer of vLLM sees tokens and no scores, so {name!r} cannot be one; {nearest(name, COPYING)}"
                )
        uniform = TableModel(torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64))  # these drafters ask for its size
        self.drafter: Drafter = compose(method, uniform, options=given).drafter
        self._vocab_size, self._num_guesses = vocab_size, num_guesses
        self._slots: list[_Slot] = []

    def guesses(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Guesses after each text. Requests that were here the last time and are not now have ended."""
        taken = [self._take(text) for text in texts]
        for gone in self._slots:
            self.drafter.finish(gone.state, 0, gone.tokens)
        self._slots = taken
        return [self._guess(slot) for slot in taken]

    def _take(self, text: Sequence[int]) -> _Slot:
        """The slot of the request that this text is of, told what came since; a new one for a text nobody knows."""
        known = [slot for slot in self._slots if slot.is_continued_by(text)]
        if known:
            slot = max(known, key=lambda one: len(one.tokens))
            self._slots.remove(slot)
            self._learn(slot, text[len(slot.tokens) :])
            slot.tokens = list(text)
            return slot
        state = RequestState.of(Request(list(text[:1]), SamplingParams()))
        return _Slot(list(text), self.drafter.start([list(text)], {}), Sampler([state], self._vocab_size, _CPU))

    def _learn(self, slot: _Slot, new: Sequence[int]) -> None:
        """Tell the drafter which of its guesses came true."""
        if slot.asked is None:
            return
        draft, plan = slot.asked
        tokens, parents = draft.tree.tokens[0].tolist(), draft.tree.parents[0].tolist()
        path = [0]
        for token in new:
            nodes = range(1, draft.tree.sizes[0])
            below = next((node for node in nodes if parents[node] == path[-1] and tokens[node] == token), None)
            if below is None:
                break
            path.append(below)
        unseen = Scores(torch.zeros(1, draft.tree.num_nodes, 1))
        self.drafter.observe(slot.state, Observation(draft, unseen, [path], [len(path) - 1], 0.0, 0.0, plan))

    def _guess(self, slot: _Slot) -> list[int]:
        """The chain of first children: vLLM checks chains."""
        zero = torch.zeros(1, dtype=torch.int64)
        context = Context([slot.tokens], slot.sampler, Noise(zero, zero), _CPU)
        plan = Plan((self._num_guesses,), (self._num_guesses,))
        draft = self.drafter.asked(slot.state, context, plan)
        slot.asked, tree = (draft, plan), draft.tree
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        chain, place = list[int](), 0
        for node in range(1, tree.sizes[0]):
            if parents[node] == place:
                chain.append(tokens[node])
                place = node
        return chain


class _Proposer(ABC):
    """What vLLM makes and calls."""

    method: ClassVar[str]

    def __init__(self, vllm_config: Any) -> None:
        self._max_len = int(vllm_config.model_config.max_model_len)
        self._drafting = SlotDrafting(
            self.method,
            vocab_size=int(vllm_config.model_config.get_vocab_size()),
            num_guesses=int(vllm_config.speculative_config.num_speculative_tokens),
            options=_given_options(),
        )

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Guesses for every slot; none for one whose prompt is still being read, or whose context is full."""
        del slot_mappings
        asks = [i for i, new in enumerate(sampled_token_ids) if len(new) and int(num_tokens_no_spec[i]) < self._max_len]
        texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])].tolist() for i in asks]
        found = dict(zip(asks, self._drafting.guesses(texts), strict=True))
        return [
            found.get(i, [])[: max(0, self._max_len - int(num_tokens_no_spec[i]) - 1)] for i in range(len(sampled_token_ids))
        ]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM loads a drafter's weights here; there are none."""
        del args, kwargs


@final
class Suffix(_Proposer):
    """``suffix``: copies from the request's own text and all earlier outputs."""

    method: ClassVar = "suffix"


@final
class PromptLookup(_Proposer):
    """``prompt-lookup``: copies from the request's own text."""

    method: ClassVar = "prompt-lookup"


@final
class NgramCache(_Proposer):
    """``ngram-cache``: n-grams of the request, of earlier requests and of a file."""

    method: ClassVar = "ngram-cache"


@final
class Reference(_Proposer):
    """``reference``: copies from documents, given as lists of tokens in the option ``references``."""

    method: ClassVar = "reference"


@final
class Hybrid(_Proposer):
    """``hybrid``: several of these in one tree, places by what came true of each; ``parts`` names them."""

    method: ClassVar = _HYBRID


def _given_options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS_VARIABLE, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f'{OPTIONS_VARIABLE} = {text!r} is not a JSON object; write it as {{"max_match": 8}}')
    return found
