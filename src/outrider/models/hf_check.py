"""What the adapter promises of a transformers model, tried when the model is opened.

Whether a model honours tree masks and positions is declared nowhere, so every promise is tried on a few tokens:

    trees       ragged rows of branching and deep trees get the logits of their sequences written out
    company     a row at the far end of the context beside one at its beginning: neither changes the other
    room        a row that is full beside one that drafts on: padding never leaves the context

A model that breaks one is refused with the reason; nothing is scored wrongly in silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.hf_cache import HFCache

_BRANCHES, _DEEP = [-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 3, 9, 10]
_PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4], [2, 7])
_FAR = 4
"""Tokens of the rows that are put at both ends of the context."""


class AdaptedModel(Target, ABC):
    """What the checks need of a model behind the adapter."""

    name: str

    @abstractmethod
    def new_cache(self, batch_size: int) -> HFCache: ...

    @abstractmethod
    def masks_of(self, mask: Tensor) -> Any:
        """The attention masks of a pass, as the model takes them, from an additive [B, 1, N, S] one."""


def check_model(model: AdaptedModel, raw: Any) -> None:
    """Refuse a model that does not do what the adapter promises. ``raw`` is the transformers model."""
    reason = _known_reason(raw)
    if reason is not None:
        raise ModelError(f"{model.name}: {type(raw).__name__} {reason}; use another model")
    for parents in (_BRANCHES, _DEEP):
        _check_trees(model, raw, parents)
    _check_company(model, raw)


def _known_reason(raw: Any) -> str | None:
    """Why an architecture cannot be used, where its config says so."""
    config = raw.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder, and only causal language models can be targets"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "places tokens by the order of keys (ALiBi), so the branches of a tree cannot have positions of their own"
    if getattr(config, "attention_layers", None) is not None and config.model_type == "gpt_neo":
        return "cuts its local attention by the order of keys, so it would mask the branches of a tree wrongly"
    return None


def _check_trees(model: AdaptedModel, raw: Any, parents: Sequence[int]) -> None:
    """Two ragged rows of trees against their sequences written out, so that mask and positions both matter."""
    prompts = [prompt[: max(1, min(len(prompt), model.max_len - len(parents) - 1))] for prompt in _PROMPTS]
    rows = [[(token + row) % model.vocab_size for token in range(5, 5 + len(parents))] for row in range(2)]
    tree = TokenTree.of_rows([(row, list(parents)) for row in rows], model.device)
    cache = model.new_cache(2)
    try:
        model.prefill([[token % model.vocab_size for token in prompt] for prompt in prompts], cache)
        found = model.score(tree, cache).logits
    except Exception as error:  # transformers raises many kinds, and all of them mean the same here
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{model.name}: {type(raw).__name__} cannot score trees ({type(error).__name__}: {reason})") from error
    num_slots = len(prompts[0]) + len(parents)
    shared = int(getattr(raw.config.get_text_config(), "num_kv_shared_layers", None) or 0)  # layers that read another's keys
    if len(cache.blocks) != model.num_layers - shared or any(keys.shape[2] != num_slots for keys, _ in cache.blocks):
        raise ModelError(
            f"{model.name}: {type(raw).__name__} keeps no keys and values per token, so guesses cannot be taken back"
        )
    for row, prompt in enumerate(prompts):
        for node in range(len(parents)):
            path = [rows[row][n] for n in (0, *tree.path(row, node))]
            unrolled = torch.tensor([[*(token % model.vocab_size for token in prompt), *path]], device=model.device)
            if not _close(found[row, node], _logits(raw, unrolled)[0, -1]):
                raise ModelError(
                    f"{model.name}: {type(raw).__name__} ignores tree masks or positions, so it would score trees wrongly"
                )


def _check_company(model: AdaptedModel, raw: Any) -> None:
    """A row at the end of the context beside one at its beginning, against each of them alone."""
    near = torch.arange(_FAR, device=model.device)[None]
    far = near + max(0, model.max_len - _FAR)
    tokens = (near + 3) % model.vocab_size
    if model.max_len < _FAR:
        return
    causal = torch.full((_FAR, _FAR), torch.finfo(model.dtype).min, dtype=model.dtype, device=model.device).triu(1)
    mask = model.masks_of(causal.expand(2, 1, _FAR, _FAR))
    both = _logits(raw, tokens.expand(2, -1), position_ids=torch.cat((near, far)), attention_mask=mask)
    for row, positions in enumerate((near, far)):
        alone = _logits(raw, tokens, position_ids=positions)
        if not _close(both[row], alone[0]):
            raise ModelError(
                f"{model.name}: {type(raw).__name__} places a row's tokens by the longest row beside it (its rotary scaling "
                "depends on the length of a pass), so texts would depend on their neighbours; open it with a smaller max_len"
            )


def _logits(raw: Any, tokens: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return raw(input_ids=tokens, use_cache=False, **options).logits


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-3 if found.dtype == torch.float32 else 0.1
    return float((found - expected).abs().max()) <= tolerance * float(expected.std())
