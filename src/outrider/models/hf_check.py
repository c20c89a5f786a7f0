"""Checks of a transformers model, run when the adapter opens it.

Whether a model honours tree masks and positions is declared nowhere, so every promise is tried on a few tokens:

    trees       ragged rows of one node, of branching and of deep trees get the logits of their sequences written out
    company     a row at the far end of the context beside one at its beginning: neither changes the other

A model that ignores trees is refused with the reason. In some models rows change each other in long contexts, because the
rotary scaling follows the length of a pass. These are opened for the longest context where they do not. So no score is wrong
without an error or a warning.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.hf_cache import HFCache
from outrider.models.hf_verdict import TextPromise

_ALONE, _BRANCHES, _DEEP = [-1], [-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 3, 9, 10]
_PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4], [2, 7])
_FAR = 4
"""Number of tokens in the rows at both ends of the context."""


class AdaptedModel(Target, ABC):
    """What the checks need of an adapted model."""

    name: str

    @abstractmethod
    def new_cache(self, batch_size: int) -> HFCache: ...

    @abstractmethod
    def masks_of(self, mask: Tensor) -> Any:
        """The attention masks of a pass, as the model takes them, from an additive [B, 1, N, S] one."""


def check_model(model: AdaptedModel, raw: Any) -> TextPromise:
    """The verdict on a model. ``raw`` is the transformers model."""
    reason = _known_reason(raw)
    for parents in (_ALONE, _BRANCHES, _DEEP):
        reason = reason or _broken_trees(model, raw, parents)
    if reason is not None:
        return TextPromise(model.max_len, refused=f"{type(raw).__name__} {reason}; use another model")
    try:
        fits = next((length for length in _contexts(raw, model.max_len) if _bears_company(model, raw, length)), None)
    except Exception as error:  # as above
        return TextPromise(
            model.max_len, refused=f"{type(raw).__name__} has no room for {model.max_len} tokens ({_short(error)}); use less"
        )
    why = (
        f"{type(raw).__name__} places a row's tokens by the longest row beside it (its rotary scaling depends on the length of "
        "a pass), so texts would depend on their neighbours"
    )
    if fits is None:
        return TextPromise(model.max_len, refused=f"{why}; use another model")
    return TextPromise(fits, capped=why if fits < model.max_len else None)


@torch.no_grad()
def agrees(model: Target, raw: Any) -> bool:
    """Whether another decoder on a model's weights gives the model's logits, on two rows with a prompt and a chain.
    Tokens come from the middle of the vocabulary, because the first ones are often untrained, and then rounding decides."""
    middle = model.vocab_size // 2
    prompts = [[(middle + 31 * token) % model.vocab_size for token in prompt] for prompt in _PROMPTS]
    prompts = [prompt[: max(1, min(2 * _FAR, model.max_len - _FAR - 1))] for prompt in prompts]  # some CPUs read slowly
    chains = [[(middle + 7 * (token + row)) % model.vocab_size for token in range(5, 5 + _FAR)] for row in range(2)]
    cache = model.new_cache(2)
    model.prefill(prompts, cache)
    found = model.score(TokenTree.chain(torch.tensor(chains, device=model.device)), cache).logits
    rows = [torch.tensor([[*prompt, *chain]], device=model.device) for prompt, chain in zip(prompts, chains, strict=True)]
    expected = [_logits(raw, row)[0, -_FAR:] for row in rows]
    return all(_alike(mine.to(theirs.dtype), theirs) for mine, theirs in zip(found, expected, strict=True))


def _contexts(raw: Any, longest: int) -> list[int]:
    """Contexts to try, longest first: the one asked for, lengths that the config names, and halves."""
    named = {value for value in _numbers(raw.config.get_text_config().to_dict()) if _FAR <= value < longest}
    halves = {longest >> power for power in range(1, longest.bit_length()) if longest >> power >= _FAR}
    return [longest, *sorted(named | halves, reverse=True)]


def _numbers(config: Mapping[Any, Any]) -> set[int]:
    """Context lengths in a config."""
    inner = [_numbers(value) for value in config.values() if isinstance(value, Mapping)]
    own = {value for name, value in config.items() if "original_max_position" in str(name) and isinstance(value, int)}
    return own.union(*inner)


def _known_reason(raw: Any) -> str | None:
    """Why an architecture cannot be used, if its config says so."""
    config = raw.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder, and only causal language models can be targets"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "places tokens by the order of keys (ALiBi), so the branches of a tree cannot have positions of their own"
    if getattr(config, "attention_layers", None) is not None and config.model_type == "gpt_neo":
        return "cuts its local attention by the order of keys, so it would mask the branches of a tree wrongly"
    return None


def _broken_trees(model: AdaptedModel, raw: Any, parents: Sequence[int]) -> str | None:
    """Compare two ragged rows of trees with their sequences written out, which tests mask and positions. Returns what is
    wrong."""
    prompts = [prompt[: max(1, min(len(prompt), model.max_len - len(parents) - 1))] for prompt in _PROMPTS]
    rows = [[(token + row) % model.vocab_size for token in range(5, 5 + len(parents))] for row in range(2)]
    tree = TokenTree.of_rows([(row, list(parents)) for row in rows], model.device)
    cache = model.new_cache(2)
    try:
        model.prefill([[token % model.vocab_size for token in prompt] for prompt in prompts], cache)
        found = model.score(tree, cache).logits
    except Exception as error:  # transformers raises many kinds, and all of them mean the same here
        return f"cannot score trees ({_short(error)})"
    num_slots = len(prompts[0]) + len(parents)
    shared = int(getattr(raw.config.get_text_config(), "num_kv_shared_layers", None) or 0)  # layers that read another's keys
    if len(cache.blocks) != model.num_layers - shared or any(keys.shape[2] != num_slots for keys, _ in cache.blocks):
        return "keeps no keys and values per token, so guesses cannot be taken back"
    for row, prompt in enumerate(prompts):
        for node in range(len(parents)):
            path = [rows[row][n] for n in (0, *tree.path(row, node))]
            unrolled = torch.tensor([[*(token % model.vocab_size for token in prompt), *path]], device=model.device)
            if not _close(found[row, node], _logits(raw, unrolled)[0, -1]):
                return _why_wrong(raw)
    return None


def _why_wrong(raw: Any) -> str:
    """Why a model scores trees differently from sequences."""
    if "position_ids" in inspect.signature(type(raw).forward).parameters:
        return "ignores tree masks or positions, so it would score trees wrongly"
    return "takes no position for each token, so the branches of a tree cannot have positions of their own"


def _bears_company(model: AdaptedModel, raw: Any, max_len: int) -> bool:
    """Whether rows at the end and at the beginning of the context get the same scores together as alone."""
    if max_len < _FAR:
        return True
    near = torch.arange(_FAR, device=model.device)[None]
    far = near + max_len - _FAR
    tokens = (near + 3) % model.vocab_size
    causal = torch.full((_FAR, _FAR), torch.finfo(model.dtype).min, dtype=model.dtype, device=model.device).triu(1)
    mask = model.masks_of(causal.expand(2, 1, _FAR, _FAR))
    both = _logits(raw, tokens.expand(2, -1), position_ids=torch.cat((near, far)), attention_mask=mask)
    alone = [_logits(raw, tokens, position_ids=positions)[0] for positions in (near, far)]
    return all(_close(found, expected) for found, expected in zip(both, alone, strict=True))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _logits(raw: Any, tokens: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return raw(input_ids=tokens, use_cache=False, **options).logits


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Whether another decoder's logits are equal up to rounding. In 16 bits the mean difference decides, since the
    largest of many tells little."""
    if found.dtype == torch.float32:
        return _close(found, expected)
    return float((found - expected).float().square().mean().sqrt()) <= 0.1 * float(expected.float().std())


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-3 if found.dtype == torch.float32 else 0.1
    return float((found - expected).abs().max()) <= tolerance * float(expected.std())
