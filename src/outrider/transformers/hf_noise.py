"""The random numbers of ``torch.multinomial``, so that sampled text is that of plain ``generate`` with the same seed.

``multinomial`` draws one token per row as the largest of ``p / q``, where q are exponential random numbers of the same shape.
At each step ``generate`` draws them for the whole batch, rows that have ended included. So the q of a step is known before the
step: it depends on the generator's state and on nothing that was written. With it a token is no longer drawn. It is the largest
of ``p / q``, and every method that is exact for greedy text finds it.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError

_KEPT = 64
"""Number of steps whose random numbers are kept. Those of other steps are drawn again from the saved state."""


@final
class TorchNoise:
    """The numbers that ``torch.multinomial`` would draw at each step of a call, from a copy of torch's generator."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._own = _generator_of(device)
        self._num_rows, self._device = num_rows, device
        self._vocab_size = 0
        self._copy = torch.Generator(device)
        self._states = [self._own.get_state()]
        self._drawn: dict[int, Tensor] = {}

    def scores(self, logits: Tensor, step: int, row: int) -> Tensor:
        """[V] scores whose largest is the token that ``generate`` draws at a step from processed ``logits`` [V]. They are
        ``log(p / q)``, so their order is that of the law with its noise, which drafters rank their guesses by."""
        self._vocab_size = len(logits)
        ratios = logits.float().softmax(-1) / self._exponential(step)[row]
        chosen = ratios.argmax()
        scores = ratios.log()
        scores[chosen] = torch.nextafter(scores[chosen], scores.new_tensor(torch.inf))  # the logarithm may make ties
        return scores

    def settle(self, num_steps: int) -> None:
        """Set torch's generator to its state after ``num_steps`` steps of plain ``generate``."""
        self._know(num_steps)
        self._own.set_state(self._states[num_steps])

    def _exponential(self, step: int) -> Tensor:
        """[B, V] the random numbers of a step."""
        if step not in self._drawn:
            self._know(step)
            self._draw(step)
        return self._drawn[step]

    def _know(self, step: int) -> None:
        """Draw numbers up to the beginning of a step."""
        while len(self._states) <= step:
            self._draw(len(self._states) - 1)

    def _draw(self, step: int) -> None:
        self._copy.set_state(self._states[step])
        numbers = torch.empty(self._num_rows, self._vocab_size, device=self._device)
        self._drawn[step] = numbers.exponential_(1, generator=self._copy)
        if len(self._states) == step + 1:
            self._states.append(self._copy.get_state())
        if len(self._drawn) > _KEPT:
            del self._drawn[next(iter(self._drawn))]


def _generator_of(device: torch.device) -> Any:
    """The generator that ``torch.multinomial`` uses on a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise OptionError(f"noise='torch' is known for CPUs and CUDA, and the prompts are on {device.type}; use noise='own'")
