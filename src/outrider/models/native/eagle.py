"""EAGLE heads as native models of one layer: a whole tree is one call."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from outrider.cache.paged import PagedCache
from outrider.core.tree import TokenTree
from outrider.models.heads.eagle import EagleHead
from outrider.models.native.decoder import NativeDecoder
from outrider.models.native.growing import Growing
from outrider.models.native.head_layer import native_layer


def native_eagle(head: EagleHead) -> NativeEagle | None:
    """The head on a CPU; None if the native pass does not support its layer, or cannot run."""
    model = native_layer(head.config.layer, head.native_weights())
    return None if model is None else NativeEagle(head, model)


@final
class NativeEagle:
    """Grows best-first trees behind columns (a state and the token after it), which it reads first."""

    def __init__(self, head: EagleHead, model: NativeDecoder) -> None:
        self._head, self._model = head, model
        whole = head.config.draft_vocab_size == head.config.vocab_size
        self._ids = None if whole else head.target_ids.contiguous()

    def new_cache(self, batch_size: int) -> PagedCache:
        return self._model.new_cache(batch_size)

    def tree(self, features: Tensor, chain: TokenTree, cache: PagedCache, growing: Growing) -> TokenTree:
        """The trees behind ``chain``, whose nodes come with the target's features [B, N, F]. The chain is committed."""
        states = self._head.fuse(features).to(torch.float32, copy=True).contiguous()
        cache.reserve(chain.num_nodes + max(growing.plan.max_depth) * growing.search.width)
        vocab_size = self._head.config.vocab_size
        return self._model.grown(chain, cache, replace(growing, states=states, ids=self._ids, vocab_size=vocab_size))[0]
