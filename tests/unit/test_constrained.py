"""What the host adds to a round with grammars: states along a tree, forced text in place of guesses, packed masks."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.constrained import follow, packed_masks


class Spelling:
    """A grammar of one text, after any one token: 5 6 7 8. The state is the number of tokens said."""

    text = (None, 5, 6, 7, 8)

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return state + 1 if state < len(self.text) and self.text[state] in (None, token) else None

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        if state >= len(self.text):
            return torch.zeros(vocab_size, dtype=torch.bool)
        wanted = self.text[state]
        return torch.arange(vocab_size) == wanted if wanted is not None else torch.ones(vocab_size, dtype=torch.bool)

    def forced(self, state: int) -> tuple[int, ...]:
        return tuple(token for token in self.text[state:] if token is not None) if state else ()


def test_a_chain_is_changed_where_the_grammar_forces_text() -> None:
    chain = [-1, 0, 1, 2, 3]
    assert follow(Spelling(), 0, [9, 3, 5, 6, 7], chain) == ([9, 3, 5, 6, 7], [0, 1, 2, 3, 4])
    assert follow(Spelling(), 0, [9, 3, 4, 6, 2], chain) == ([9, 3, 5, 6, 7], [0, 1, 2, 3, 4])
    assert follow(Spelling(), 1, [9, -1, -1, -1, -1], chain) == ([9, 5, 6, 7, 8], [1, 2, 3, 4, 5])
    assert follow(Spelling(), 5, [9, 3, 4, 6, 2], chain) == ([9, 3, 4, 6, 2], [5, None, None, None, None])


def test_a_tree_keeps_guesses_that_may_follow() -> None:
    tokens, parents = [9, 4, 5, 1, 6, 2], [-1, 0, 0, 1, 2, 4]
    guesses, states = follow(Spelling(), 1, tokens, parents)
    assert guesses == [9, 4, 5, 1, 6, 7], "the second guess is right; below it, what must follow replaces a wrong one"
    assert states == [1, None, 2, None, 3, 4]


def test_masks_are_packed_eight_tokens_a_byte() -> None:
    masks = packed_masks(Spelling(), [0, 2, None, 5], 19)
    bits = np.unpackbits(masks.numpy(), axis=1, bitorder="little")[:, :19]
    assert masks.shape == (4, 3)
    assert bits[0].all() and bits[1].nonzero()[0].tolist() == [6]
    assert bits[2].all() and bits[3].all(), "unreachable, and a dead end"
