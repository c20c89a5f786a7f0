"""Token-level intersection: a draft model with another tokenizer guesses the tokens both vocabularies have.

Two vocabularies that were learnt apart still share most of their frequent tokens. The draft's logits of the shared ones are
moved to the target's ids, and all others are left out. So the draft has a law over the target's own vocabulary. Everything else
is ordinary speculation with a draft model. The draft reads the text with its own tokenizer. (Timor et al. 2025, "Accelerating
LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202.)

    q(v) ~ exp(l(draft's id of v)) for v in both vocabularies, 0 elsewhere      then the request's own sampling parameters

Lossless under the rules ``draft-model`` is lossless under: q is the law the guess is drawn from. At most p(shared tokens) is
accepted per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Context, Drafter, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.sampling import Law
from outrider.core.translation import Translation
from outrider.core.tree import TokenTree
from outrider.drafters.model.other_tokenizer import OtherTokenizerDrafter, OtherTokenizerState


@final
class SharedTokens(OtherTokenizerDrafter):
    """Chains of tokens that both vocabularies have."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.IID)

    def __init__(self, model: Target, translation: Translation, *, vocab_size: int, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(model, translation, vocab_size=vocab_size, draws=draws)
        shared = translation.shared()[: model.vocab_size]
        self._draft_ids = (shared >= 0).nonzero()[:, 0]
        self._target_ids = shared[self._draft_ids]
        if not len(self._draft_ids):
            raise CompositionError("the two vocabularies share no token; use method 'reencode', which translates text")
        self._draft_id_of = dict(zip(self._target_ids.tolist(), self._draft_ids.tolist(), strict=True))

    def _read(self, state: OtherTokenizerState, row: int, tokens: Sequence[int]) -> list[int] | None:
        """The draft's reading of the text; None inside a character, where the draft cannot have read every token."""
        ids, known = super()._read(state, row, tokens), state.known[row]
        return ids if known and known[-1].num_tokens == len(tokens) else None

    def _guess(self, state: OtherTokenizerState, context: Context, logits: Tensor, depths: Sequence[int]) -> Draft:
        depths = list(depths)
        chain = torch.tensor(context.roots, device=context.device)[:, None]
        laws: list[Law] = []
        while True:
            tree = TokenTree.chain(chain)
            law = context.sampler.law(self._moved(logits), tree, context.noise, start=tree.num_nodes - 1)
            depths = self._possible(law, depths, len(laws))
            if max(depths) <= len(laws):
                break
            guesses = law.choices if self.draws is Draws.DETERMINISTIC else law.draw(tree.depths[:, -1:])
            chain, laws = torch.cat([chain, guesses], 1), [*laws, law]
            if max(depths) <= len(laws):
                break
            going = zip(guesses[:, 0].tolist(), depths, strict=True)
            logits = self._advance(state, [self._draft_id_of[t] if depth > len(laws) else None for t, depth in going])
        tree = TokenTree.chain(chain[:, : max(depths) + 1], [depth + 1 for depth in depths])
        return Draft(tree, self.draws, self._laws(laws) if self.draws is Draws.IID and laws else None)

    def _moved(self, logits: Tensor) -> Tensor:
        """The draft's logits at the target's ids; -inf for tokens that the draft lacks."""
        moved = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        moved[..., self._target_ids.to(logits.device)] = logits[..., self._draft_ids.to(logits.device)]
        return moved

    @staticmethod
    def _possible(law: Law, depths: Sequence[int], num_drawn: int) -> list[int]:
        """The depths, cut where the request forbids every shared token, so that there is no law to draw from."""
        possible = (law.logits > -torch.inf).any(-1)[:, 0].tolist()
        return [depth if fine else min(depth, num_drawn) for depth, fine in zip(depths, possible, strict=True)]

    @staticmethod
    def _laws(laws: Sequence[Law]) -> Tensor:
        """[B, N, V] the law at every node with a guess; the last node has none."""
        q = torch.cat([law.probs for law in laws], 1).nan_to_num(0.0)
        return torch.cat([q, torch.zeros_like(q[:, :1])], 1)


def build(parts: Parts) -> Drafter:
    return SharedTokens(parts.draft_model, parts.tokenizers, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model with another tokenizer guesses the tokens both have",
    paper="Timor et al. 2025, TLI (arXiv 2502.05202)",
    drafter=SharedTokens,
    build=build,
    needs_draft=True,
    any_tokenizer=True,
)
