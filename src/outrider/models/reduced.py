"""Draft models that can produce only the commonest tokens (FR-Spec: Zhao et al. 2025, arXiv 2502.14856).

A draft with a large vocabulary spends much of its time on its output matrix, most rows of which belong to tokens it never
guesses. A reduced draft reads all tokens, but has output rows for only some of them. The target verifies its guesses as always,
so only the acceptance rate changes.

    logits(x) = W[ids] h,  in place ids of the whole vocabulary;  -inf elsewhere

A folder says so by ``draft_vocab_size`` in ``config.json`` and a tensor ``d2t``: row i is of token i + d2t[i], as in the
folders of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError, OptionError
from outrider.core.guessing_target import Guesses, GuessingTarget, TreeSearch
from outrider.core.interfaces import Cache
from outrider.core.layered_target import LayeredTarget
from outrider.core.plan import Plan
from outrider.core.resume import Resume
from outrider.core.rng import Noise
from outrider.core.scores import Scores
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget
from outrider.models.checkpoint import write_checkpoint
from outrider.models.native import NativeDecoder
from outrider.models.weights import SafetensorsFolder, TensorSource

_SIZE, _OFFSETS = "draft_vocab_size", "d2t"


@final
class ReducedDraft(WrappedTarget[LayeredTarget], GuessingTarget):
    """A decoder whose output matrix has rows for only some tokens of the vocabulary. On the native decoder it guesses whole
    chains and trees in one call."""

    def __init__(self, inner: LayeredTarget, ids: Tensor, vocab_size: int) -> None:
        super().__init__(inner)
        self._ids, self.vocab_size = ids.to(inner.device), vocab_size
        self.traits = replace(self.traits, says_all=False)
        self._guessing = inner.guessing(self._ids, vocab_size) if isinstance(inner, NativeDecoder) else None

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        return self.inner.prefill(rows, cache, taps=taps)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        scores = self.inner.score(tree, cache, taps=taps, start=start, resume=resume)
        return Scores(self._spread(scores.logits), scores.taps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._spread(self.inner.logits(hidden))

    def guess(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, plan: Plan, tempering: Tempering, noise: Noise
    ) -> Guesses | None:
        if self._guessing is None:
            return None
        return self._guessing.guess(rows, cache, plan=plan, tempering=tempering, noise=noise)

    def guess_tree(
        self, rows: Sequence[Sequence[int]], cache: Cache, *, search: TreeSearch, plan: Plan, tempering: Tempering, noise: Noise
    ) -> tuple[TokenTree, Tensor] | None:
        if self._guessing is None:
            return None
        return self._guessing.guess_tree(rows, cache, search=search, plan=plan, tempering=tempering, noise=noise)

    def _spread(self, logits: Tensor) -> Tensor:
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return full.index_copy_(-1, self._ids, logits)


def spoken_ids(raw: Mapping[str, Any], source: TensorSource) -> Tensor | None:
    """[Vd] the only tokens that a folder's model can produce, ascending; None for all."""
    count, vocab_size = int(raw.get(_SIZE) or 0), int(raw.get("vocab_size") or 0)
    if not count or count == vocab_size:
        return None
    if _OFFSETS not in source.names:
        raise ModelError(f"{source.origin}: config.json says {_SIZE} = {count} and there is no tensor 'd2t'; trim it again")
    ids = source.read(_OFFSETS) + torch.arange(count)
    if len(ids.unique()) != count or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"{source.origin}: tensor 'd2t' does not name {count} tokens of {vocab_size}; trim it again")
    return ids


def trim_model(folder: Path, raw: Mapping[str, Any], ids: Tensor, out: Path, notes: Mapping[str, Any]) -> None:
    """Write the model in ``folder`` restricted to the output tokens ``ids``, ascending. Other tensors are unchanged."""
    if raw.get(_SIZE):
        raise OptionError(f"{folder} has a reduced vocabulary already; trim the model that it was made from")
    source = SafetensorsFolder(folder)
    tensors = {name: source.read(name) for name in source.names}
    tensors[_OFFSETS] = ids - torch.arange(len(ids))
    beside = [file for file in folder.glob("*") if file.suffix in (".json", ".jinja", ".model") and "index" not in file.name]
    write_checkpoint(out, tensors, config={**raw, _SIZE: len(ids)}, notes=notes, beside=beside)
