"""The tokens that a draft should be able to produce: the commonest of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.train.data import Document


class ChosenTokens(NamedTuple):
    """The chosen tokens."""

    ids: Tensor
    """Token ids, ascending."""
    coverage: float
    """Share of the text's tokens that are chosen."""


def commonest(documents: Sequence[Document], count: int, vocab_size: int, *, always: Sequence[int] = ()) -> ChosenTokens:
    """The ``count`` most frequent tokens of the learned positions, including ``always``."""
    if not len(set(always)) <= count <= vocab_size or count < 1:
        raise OptionError(f"{count} tokens cannot be chosen of {vocab_size}; use {max(1, len(set(always)))} to {vocab_size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.begin :], minlength=vocab_size)
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    ids = np.sort(np.argsort(-rank, kind="stable")[:count])
    return ChosenTokens(torch.from_numpy(ids), float(counts[ids].sum() / max(1, counts.sum())))
