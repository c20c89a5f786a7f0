"""The first step of every drafter with its own model: read the committed tokens that its cache lacks.

After a round the cache holds the guesses that were accepted and had been fed. The token that the target added, and often the
last accepted guess, are still to be read. That is one or two tokens per row, read in one pass, and its last logits are the
draft's law of the next token. Prompts are read the same way when a row is first drafted for, so a drafter that is never asked
reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Context, Target
from outrider.core.tree import TokenTree

_MOST_SCORED = 16
"""Most tokens that are read together with the root in one pass, although only the root's logits are needed."""


def room(model: Target, tokens: Sequence[int], depth: int) -> int:
    """How many of ``depth`` guesses fit into the draft model's own context after ``tokens``."""
    return max(0, min(depth, model.max_len - len(tokens)))


def missing_from(model: Target, cache: Cache, context: Context, late: Sequence[int] = ()) -> list[list[int]]:
    """Committed tokens of each row that the cache lacks, including the root of the next tree; of ``late`` rows only the first
    one. Call it at the beginning of a round."""
    cache.settle()
    missing = [list(row[done : model.max_len]) for row, done in zip(context.tokens, cache.lengths, strict=True)]
    return [tokens[:1] if row in late else tokens for row, tokens in enumerate(missing)]


def read_up(model: Target, cache: Cache, context: Context, most: int) -> list[int]:
    """Read ``most`` tokens of the first row that lacks more than that. Returns the rows that lacked more."""
    missing = missing_from(model, cache, context)
    late = [row for row, tokens in enumerate(missing) if len(tokens) > most]
    if late:
        model.prefill([tokens[:most] if row == late[0] else [] for row, tokens in enumerate(missing)], cache)
    return late


def cut_back(cache: Cache, lengths: Sequence[int]) -> None:
    """Keep at most ``lengths[b]`` tokens of each row."""
    kept = list(map(min, lengths, cache.lengths))
    if kept != list(cache.lengths):
        cache.truncate(kept)


def catch_up(model: Target, cache: Cache, context: Context, late: Sequence[int] = ()) -> Tensor:
    """[B, 1, V] logits after each row's last committed token. Commits all tokens, the root of the next tree included. Of
    ``late`` rows, whose logits are not needed, one token is read."""
    missing = missing_from(model, cache, context, late)
    if max(len(row) for row in missing) > _MOST_SCORED:  # no logits for many tokens nobody guesses after
        model.prefill([row[:-1] for row in missing], cache)
        missing = [row[-1:] for row in missing]
    longest = max(len(row) for row in missing)
    fed = torch.tensor([[*row, *[0] * (longest - len(row))] for row in missing], device=context.device)
    logits = model.score(TokenTree.chain(fed, [len(row) for row in missing]), cache).logits
    cache.commit([range(len(row)) for row in missing])
    last = torch.tensor([max(len(row) - 1, 0) for row in missing], device=logits.device)
    return logits[torch.arange(len(missing), device=logits.device), last][:, None]


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's vocabulary. Tokens that the draft does not know are never guessed."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits
