"""Our training-free drafters inside vLLM, as proposers of its ``custom_class`` method. Nothing of vLLM is imported here.

    vllm serve MODEL --speculative-config
        '{"method": "custom_class", "model": "outrider.vllm_plugin.SuffixProposer", "num_speculative_tokens": 8}'

vLLM finds the class by its path, makes an object with its config, and calls ``propose`` after every step with the tokens of
every slot of its batch. It does not say which request is in a slot, and moves requests between slots. So a request is
recognised by its tokens. A state belongs to the slot whose text continues the state's text, and the continuation shows which
guesses were right. The engine vLLM checks guesses by its own rule, and its text does not change. Options of the method come as
JSON in ``OUTRIDER_VLLM_OPTIONS``. ``register`` is an entry point that vLLM calls when it starts.

Token recycling reads scores too. A proposer receives vLLM's model (``load_model``). The logits of a step are kept until the
next guesses: a row for the last token of every slot, and one for each guess after it.
"""

from __future__ import annotations

import json
import os
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.method_rows import names_in
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.methods import compose
from outrider.models.tiny import TableModel

OPTIONS_VARIABLE = "OUTRIDER_VLLM_OPTIONS"
COPYING = ("suffix", "prompt-lookup", "ngram-cache", "reference")
"""Methods that need nothing but tokens."""
_HYBRID = "hybrid"
_RECYCLING = "token-recycling"
_OF_CHAINS = {"num_successors": 1, "recycle_prompt": False}
"""Options of token recycling here: vLLM verifies chains only, and shows only the last scores of a prompt."""
_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Slot:
    """A request of vLLM's batch."""

    tokens: list[int]
    state: Any
    sampler: Sampler
    asked: tuple[Draft, Plan] | None = None
    """The guesses after these tokens."""
    chain: Sequence[int] = ()
    """The part of it that vLLM received."""

    def is_continued_by(self, tokens: Sequence[int]) -> bool:
        size = len(self.tokens)
        return size <= len(tokens) and list(tokens[:size]) == self.tokens


@final
class SlotDrafting:
    """A drafter for the slots of a batch that another engine runs."""

    def __init__(self, method: str, *, vocab_size: int, num_guesses: int, options: Mapping[str, Any] | None = None) -> None:
        given: dict[str, Any] = {**(options or {}), "num_draft_tokens": num_guesses}
        if method == _HYBRID:
            given = {"parts": COPYING[:1] + COPYING[2:3], **given, "num_tree_nodes": num_guesses}
        if method == _RECYCLING:
            given = _recycling_options(given, num_guesses)
        for name in names_in(given["parts"]) if method == _HYBRID else (method,):
            if name not in COPYING and name != method:
                raise OptionError(
                    f"in vLLM a part of a hybrid sees tokens but no scores, so {name!r} cannot be one; {nearest(name, COPYING)}"
                )
            if name not in (*COPYING, _RECYCLING):
                raise OptionError(f"{name!r} cannot be a proposer of vLLM; {nearest(name, (*COPYING, _RECYCLING))}")
        uniform = TableModel(torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64))  # these drafters ask for its size
        self.drafter: Drafter = compose(method, uniform, options=given).drafter
        self._vocab_size, self._num_guesses = vocab_size, num_guesses
        self.reads_scores = method == _RECYCLING
        self._slots: list[_Slot] = []

    def guesses(self, texts: Sequence[Sequence[int] | None], logits: Tensor | None = None) -> list[list[int]]:
        """Guesses after each text; none if the text is None. Requests whose texts are missing, unlike last time, have ended.
        ``logits`` [n, V] are those of the step that wrote the texts: for each slot, of the last token before the step and of
        its guesses."""
        known = [None if text is None else self._known(text) for text in texts]
        counts = [1 if slot is None else 1 + len(slot.chain) for slot in known]
        is_whole = logits is not None and len(logits) == sum(counts)  # vLLM may have left guesses out
        seen = logits.to(_CPU).split(counts) if logits is not None and is_whole else [None] * len(counts)
        taken = [
            None if text is None else self._take(text, slot, rows) for text, slot, rows in zip(texts, known, seen, strict=True)
        ]
        for gone in self._slots:
            self.drafter.finish(gone.state, 0, gone.tokens)
        self._slots = [slot for slot in taken if slot is not None]
        return [[] if slot is None else self._guess(slot) for slot in taken]

    def _known(self, text: Sequence[int]) -> _Slot | None:
        """The slot whose text this one continues. It is removed from the known slots."""
        known = [slot for slot in self._slots if slot.is_continued_by(text)]
        if not known:
            return None
        slot = max(known, key=lambda one: len(one.tokens))
        self._slots.remove(slot)
        return slot

    def _take(self, text: Sequence[int], slot: _Slot | None, seen: Tensor | None) -> _Slot:
        """The slot of this text, updated with the new tokens; a new one if the text is unknown."""
        if slot is not None:
            self._learn(slot, text[len(slot.tokens) :], seen)
            slot.tokens = list(text)
            return slot
        state = RequestState.of(Request(list(text[:1]), SamplingParams()))
        slot = _Slot(list(text), self.drafter.start([list(text)], {}), Sampler([state], self._vocab_size, _CPU))
        if self.reads_scores and seen is not None and len(text) > 1:  # of the last token of the prompt
            root = Draft(TokenTree.chain(torch.tensor([text[-2:-1]])), self.drafter.draws)
            self.drafter.observe(slot.state, Observation(root, Scores(seen[None]), [[0]], [0], 0.0, 0.0, None))
        return slot

    def _learn(self, slot: _Slot, new: Sequence[int], seen: Tensor | None) -> None:
        """Tell the drafter which of its guesses were accepted, and the scores."""
        if slot.asked is None or (self.reads_scores and seen is None):
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
        scores = Scores(torch.zeros(1, draft.tree.num_nodes, 1) if seen is None else seen[None])
        self.drafter.observe(slot.state, Observation(draft, scores, [path], [len(path) - 1], 0.0, 0.0, plan))

    def _guess(self, slot: _Slot) -> list[int]:
        """The chain of first children, because vLLM verifies chains only."""
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
        slot.chain = chain
        return chain


def _recycling_options(given: Mapping[str, Any], num_guesses: int) -> dict[str, Any]:
    fixed = next((name for name in _OF_CHAINS if name in given), None)
    if fixed is not None:
        raise OptionError(f"{fixed} is {_OF_CHAINS[fixed]} for a proposer of vLLM, which verifies chains only; leave it out")
    return {**given, **_OF_CHAINS, "num_tree_nodes": num_guesses}


class _Proposer(ABC):
    """The class that vLLM makes and calls."""

    method: ClassVar[str]

    def __init__(self, vllm_config: Any) -> None:
        self._logits: Tensor | None = None
        """The logits of the last step."""
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
        """Guesses for every slot. A slot whose prompt is still being read, or whose context is full, gets none."""
        del slot_mappings
        sizes = [int(num_tokens_no_spec[slot]) for slot in range(len(sampled_token_ids))]
        asks = [len(new) > 0 and size < self._max_len for new, size in zip(sampled_token_ids, sizes, strict=True)]
        texts = [token_ids_cpu[slot, : sizes[slot]].tolist() if asked else None for slot, asked in enumerate(asks)]
        found, self._logits = self._drafting.guesses(texts, self._logits), None
        return [guesses[: max(0, self._max_len - size - 1)] for guesses, size in zip(found, sizes, strict=True)]

    def load_model(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        """Called where vLLM loads a drafter's weights. There are none, but it also passes the model."""
        del args, kwargs
        if model is None or not self._drafting.reads_scores:
            return
        compute = model.compute_logits

        def kept(*inputs: Any, **options: Any) -> Any:
            logits = compute(*inputs, **options)
            self._logits = None if logits is None else logits.detach().clone()  # vLLM's sampler writes to them
            return logits

        model.compute_logits = kept


@final
class SuffixProposer(_Proposer):
    """``suffix``: copies from the request's own text and all earlier outputs."""

    method: ClassVar = "suffix"


@final
class PromptLookupProposer(_Proposer):
    """``prompt-lookup``: copies from the request's own text."""

    method: ClassVar = "prompt-lookup"


@final
class NgramCacheProposer(_Proposer):
    """``ngram-cache``: n-grams of the request, of earlier requests and of a file."""

    method: ClassVar = "ngram-cache"


@final
class ReferenceProposer(_Proposer):
    """``reference``: copies from documents, given as lists of tokens in the option ``references``."""

    method: ClassVar = "reference"


@final
class HybridProposer(_Proposer):
    """``hybrid``: several of these in one tree, with nodes shared by acceptance; ``parts`` names them."""

    method: ClassVar = _HYBRID


@final
class TokenRecyclingProposer(_Proposer):
    """``token-recycling``: a chain of the target's likeliest tokens, as of the last time each token was scored."""

    method: ClassVar = _RECYCLING


def register() -> None:
    """Check the options. vLLM calls this in each of its processes before a model is loaded (entry point
    ``vllm.general_plugins``), so invalid options stop it before minutes of loading."""
    _given_options()


def _given_options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS_VARIABLE, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f'{OPTIONS_VARIABLE} = {text!r} is not a JSON object; write it as {{"max_match": 8}}')
    return found
