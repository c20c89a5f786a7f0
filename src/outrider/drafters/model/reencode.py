"""Drafting by text: a draft model with any tokenizer writes a few words, and the target's tokenizer encodes them again.

The committed text is decoded and read by the draft model in its own tokens. Its greedy continuation is decoded again and
encoded with the target's tokenizer, together with the last words before it. The target then checks those tokens like any other
guesses. The two vocabularies need nothing in common. If the draft's tokens are longer than the target's, drafting takes fewer
steps than there are guesses; if shorter, more. (Timor et al. 2025, string-level exact match, arXiv 2502.05202; "universal
assisted generation" in Hugging Face transformers.)

    guesses = encode_target(text + decode_draft(x_1 .. x_K)) after the committed tokens,    x_i = argmax q(. | x_<i)

Guesses are chosen, not sampled, and have no q in the target's vocabulary: lossless under ``coupled`` and ``delta``, and
greedy requests profit most. Where the continuation does not begin at the end of a token, nothing is guessed in that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Context, Drafter, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.translation import Translation
from outrider.core.tree import TokenTree
from outrider.drafters.model.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerState


@final
class Reencode(OtherTokenizerDrafter):
    """Chains of the target's tokens for what a draft model with another tokenizer writes."""

    offers: ClassVar = (Draws.DETERMINISTIC,)

    def __init__(self, model: Target, translation: Translation, *, vocab_size: int) -> None:
        super().__init__(model, translation, vocab_size=vocab_size, draws=Draws.DETERMINISTIC)

    def _guess(self, state: OtherTokenizerState, context: Context, logits: Tensor, depths: Sequence[int]) -> Draft:
        texts = [list(read) for read in state.read]
        steps = [self._num_steps(*row) for row in zip(context.tokens, texts, depths, strict=True)]
        drafted: list[list[int]] = [[] for _ in depths]
        for drawn in range(1, max(steps) + 1):
            best = logits[:, 0].argmax(-1).tolist()
            for row, (token, wanted) in enumerate(zip(best, steps, strict=True)):
                if wanted >= drawn:
                    drafted[row].append(token)
            if drawn < max(steps):
                logits = self._advance(state, [t if wanted > drawn else None for t, wanted in zip(best, steps, strict=True)])
        rows: list[tuple[list[int], list[int]]] = []
        for tokens, text, new, depth in zip(context.tokens, texts, drafted, depths, strict=True):
            found = self.translation.to_target(tokens, text, new)[:depth] if new else []
            known = next((i for i, token in enumerate(found) if token >= self.vocab_size), len(found))
            rows.append(([tokens[-1], *found[:known]], list(range(-1, known))))
        return Draft(TokenTree.of_rows(rows, context.device), self.draws)

    def _num_steps(self, tokens: Sequence[int], read: Sequence[int], depth: int) -> int:
        """Draft tokens that hold about as much text as ``depth`` target tokens, estimated from the text so far."""
        return min(ceil(depth * len(read) / len(tokens)), self.model.max_len - len(read)) if depth else 0


def build(parts: Parts) -> Drafter:
    return Reencode(parts.draft_model, parts.tokenizers, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a draft model with any tokenizer writes text, cut anew into the target's tokens",
    paper="Timor et al. 2025, SLEM (arXiv 2502.05202); Hugging Face's universal assisted generation",
    drafter=Reencode,
    build=build,
    needs_draft=True,
    any_tokenizer=True,
)
