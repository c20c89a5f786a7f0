"""Sources whose surplus is known: a Markov chain, where it is zero, and a hidden Markov model, where it can be computed.

The state of a source after a text holds all information of the text about what follows. For a Markov chain it is the last
token, for a hidden Markov model the probabilities of the hidden state (the forward algorithm). The function ``exact`` sums over
all texts of a given length, because the state and the tokens in between are equivalent to the whole text.

    surplus at offset k  =  I(H_t; W_{t+k+1} | W_{t+1} .. W_{t+k})  =  H(next | k tokens)  -  H(next | k + num_before tokens)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.bench.surplus.probe import TextWithStates


@dataclass(frozen=True, eq=False)
class HiddenMarkov:
    """A hidden Markov model: transition [S, S] and emission [S, V] matrices whose rows sum to 1."""

    transition: Tensor
    emission: Tensor

    @staticmethod
    def markov(transition: Tensor) -> HiddenMarkov:
        """A Markov chain: every state emits its own token."""
        return HiddenMarkov(transition.double(), torch.eye(len(transition), dtype=torch.float64))

    @property
    def stationary(self) -> Tensor:
        """[S] long-run frequency of each state."""
        return torch.linalg.matrix_power(self.transition, 1 << 16)[0]

    def step(self, belief: Tensor, token: int) -> Tensor:
        """The belief [S] in the next state after one more token."""
        joint = belief * self.emission[:, token]
        return joint @ self.transition / joint.sum().clamp(min=1e-300)

    def sample(self, num_tokens: int, *, seed: int = 0) -> TextWithStates:
        """A text, with the belief after every token as its hidden states."""
        generator = torch.Generator().manual_seed(seed)
        belief, tokens, states = self.stationary, [], []
        for _ in range(num_tokens):
            token = int(torch.multinomial(belief @ self.emission, 1, generator=generator))
            belief = self.step(belief, token)
            tokens.append(token)
            states.append(belief)
        return TextWithStates(torch.stack(states).float(), torch.tensor(tokens))

    def exact(self, offset: int, *, num_before: int = 8) -> float:
        """Surplus at an offset, in nats, of states that have read ``num_before`` tokens."""
        return self.conditional_entropy(offset) - self.conditional_entropy(offset + num_before)

    def conditional_entropy(self, num_known: int) -> float:
        """Entropy in nats of a token whose ``num_known`` predecessors are known: a sum over all texts of that length."""
        joint = self.stationary[None]  # [texts, S] probability of the text and of the state that follows it
        for _ in range(num_known):
            joint = ((joint[:, None] * self.emission.T) @ self.transition).flatten(0, 1)
        chances = joint @ self.emission
        given = chances / chances.sum(-1, keepdim=True).clamp(min=1e-300)
        return -float(torch.where(chances > 0, chances * given.clamp(min=1e-300).log(), 0.0).sum())
