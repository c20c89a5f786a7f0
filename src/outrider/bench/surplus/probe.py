"""The probe: two equal networks guess a token beyond the next, one with the hidden state and one without it.

Both see the tokens in between. The difference of their held-out losses estimates the information of the state beyond those
tokens. The estimate is too large if the network is too small to use the tokens, and too small if it cannot use the state.
(Information surplus: arXiv 2507.19247; the probe is ours.)

    surplus(k)  ~  CE(tokens in between)  -  CE(tokens in between + state)          [nats, held out]
    state alone (Medusa's input) | state + tokens (Hydra's, EAGLE's) | tokens alone (a drafter without the target's states)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TextWithStates:
    """A text, and the state after each of its tokens: ``states[t]`` has read ``tokens[: t + 1]``."""

    states: Tensor
    tokens: Tensor
    choices: Tensor | None = None
    """[T] the target's greedy token after each place, where known. Guesses are compared with it."""


@dataclass(frozen=True, eq=False)
class Readout:
    """The target's own embedding and output matrix, around which a probe is built. They are frozen."""

    embedding: Tensor
    """[V, E]"""
    output: Tensor
    """[V, H]"""

    @staticmethod
    def one_hot(vocab_size: int) -> Readout:
        """One-hot vectors, for sources without matrices."""
        return Readout(torch.eye(vocab_size), torch.eye(vocab_size))


@dataclass(frozen=True)
class ProbeOptions:
    """How a probe is trained."""

    num_steps: int = 300
    batch_size: int = 128
    width: int = 64
    learning_rate: float = 2e-3
    dropout: float = 0.1
    judge_every: int = 50
    """Steps between evaluations on the texts that choose the best probe."""
    held_out: float = 0.2
    """Share of the texts used for the final evaluation. As many choose the best probe."""
    seed: int = 0


@dataclass(frozen=True, eq=False)
class ProbeScore:
    """Quality of a probe at held-out places."""

    loss: float
    """Cross-entropy with the text, in nats."""
    hits: tuple[Tensor, ...]
    """Text by text, place by place: whether its best token is the target's own choice there."""

    @property
    def agreement(self) -> float:
        """Share of places with a hit."""
        return float(torch.cat(self.hits).float().mean())


@final
class _Probe(nn.Module):
    """A small network and a linear map from compressed inputs to the output matrix."""

    def __init__(self, num_inputs: int, readout: Readout, options: ProbeOptions) -> None:
        super().__init__()
        width = options.width
        size = readout.output.shape[1]
        self.drop = nn.Dropout(options.dropout)
        self.narrow, self.direct = nn.Linear(num_inputs, width), nn.Linear(width, size)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, size)
        self.scale = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(len(readout.output)))
        self.register_buffer("output", readout.output)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.narrow(self.drop(inputs))
        x = self.direct(seen) + self.outer(F.silu(self.inner(F.silu(seen))))
        return F.linear(x * self.scale, self.get_buffer("output"), self.bias)


def inputs_of(sample: TextWithStates, readout: Readout, offset: int, *, state: bool, tokens: bool) -> Tensor:
    """[T - offset - 1, ...] input of a probe at every place: the state there, and the tokens up to the guessed one."""
    count = len(sample.tokens) - offset - 1
    between = [readout.embedding[sample.tokens[k : k + count]] for k in range(1, offset + 1)]
    states = sample.states[:count]
    scale = states.pow(2).mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    parts = [states * scale] if state else []
    return torch.cat([*parts, *(between if tokens else []), torch.ones(count, 1)], -1)


def probe(
    samples: Sequence[TextWithStates], readout: Readout, offset: int, *, state: bool, tokens: bool, options: ProbeOptions
) -> ProbeScore:
    """Train one probe for the token ``offset`` places beyond the next, and evaluate it on unseen texts."""
    kept = max(1, round(len(samples) * options.held_out))
    parts = _split(samples, kept)
    places = [_places(part, readout, offset, state=state, tokens=tokens) for part in parts]
    torch.manual_seed(options.seed)
    model = _Probe(places[0].inputs.shape[1], readout, options)
    _train(model, places[2], places[1], options)
    loss, hits = _read(model, places[0])
    return ProbeScore(loss, hits.split([len(sample.tokens) - offset - 1 for sample in parts[0]]))


@dataclass(frozen=True, eq=False)
class _Places:
    """The places where a probe guesses: its inputs, the text's tokens, the target's choices."""

    inputs: Tensor
    labels: Tensor
    choices: Tensor

    def first(self, count: int) -> _Places:
        return _Places(self.inputs[:count], self.labels[:count], self.choices[:count])


def _split(samples: Sequence[TextWithStates], kept: int) -> tuple[Sequence[TextWithStates], ...]:
    """Texts for the final evaluation, for choosing, and for training."""
    return samples[:kept], samples[kept : 2 * kept], samples[2 * kept :]


def _places(samples: Sequence[TextWithStates], readout: Readout, offset: int, *, state: bool, tokens: bool) -> _Places:
    inputs = [inputs_of(one, readout, offset, state=state, tokens=tokens) for one in samples]
    return _Places(torch.cat(inputs), torch.cat([one.tokens[offset + 1 :] for one in samples]), _choices(samples, offset))


def _train(model: _Probe, places: _Places, judged: _Places, options: ProbeOptions) -> None:
    """Train, and keep the weights that were best on ``judged``. So a probe with more inputs does not lose by overfitting."""
    rule = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.05)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(rule, options.num_steps)
    generator = torch.Generator().manual_seed(options.seed)
    best, weights = float("inf"), model.state_dict()
    for step in range(1, options.num_steps + 1):
        rows = torch.randint(len(places.inputs), (options.batch_size,), generator=generator)
        loss = F.cross_entropy(model(places.inputs[rows]), places.labels[rows])
        rule.zero_grad()
        loss.backward()
        rule.step()
        decay.step()
        if step % options.judge_every == 0 or step == options.num_steps:
            reached, _ = _read(model, judged.first(2048))
            if reached < best:
                best, weights = reached, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)


def _choices(samples: Sequence[TextWithStates], offset: int) -> Tensor:
    """The target's choice at the guessed place; the text's token if it is unknown."""
    chosen = [one.tokens[offset + 1 :] if one.choices is None else one.choices[offset : len(one.tokens) - 1] for one in samples]
    return torch.cat(chosen)


@torch.no_grad()
def _read(model: _Probe, places: _Places) -> tuple[float, Tensor]:
    """The loss, and the hits [places]."""
    model.eval()
    losses, hits = [], []
    for begin in range(0, len(places.inputs), 1024):
        rows = slice(begin, begin + 1024)
        logits = model(places.inputs[rows])
        losses.append(F.cross_entropy(logits, places.labels[rows], reduction="none"))
        hits.append(logits.argmax(-1) == places.choices[rows])
    model.train()
    return float(torch.cat(losses).mean()), torch.cat(hits)
