"""Denoising paths: how one continuous token is drawn, step by step, from noise.

A token is the last point of a path. Every step is a Gaussian whose mean comes from a denoiser and whose width from a schedule
that target and draft share. The last step has a width above 0: a token then has a density, and speculation can be exact.

    x_T ~ N(0, 1),    x_{t-1} = mean(x_t, t) + width_t * noise_t,    t = T .. 1,    token = x_0

The widths are those of the diffusion posterior with a cosine schedule (Ho et al. 2020, arXiv 2006.11239; Nichol & Dhariwal
2021, arXiv 2102.09672).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError


@final
@dataclass(frozen=True)
class Schedule:
    """Signal and noise of every diffusion step."""

    num_steps: int
    """T, the number of steps."""
    last_width: float = 0.02
    """Width of the last step. The posterior's own width there would be 0."""

    def __post_init__(self) -> None:
        if self.num_steps < 1 or not self.last_width > 0:
            values = f"num_steps = {self.num_steps}, last_width = {self.last_width}"
            raise OptionError(f"{values} is not valid; use at least one step and a width above 0")

    @cached_property
    def signal(self) -> Tensor:
        """[T + 1] share of the signal's variance after t steps, from 1 to nearly 0."""
        angles = (torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps + 0.008) / 1.008 * math.pi / 2
        share = angles.cos().square()
        return (share / share[0]).clamp(1e-4, 1.0)

    @cached_property
    def widths(self) -> Tensor:
        """[T + 1] the width of step t. Entry 0 is not used."""
        before, after = self.signal[:-1], self.signal[1:]
        variance = (1 - before) / (1 - after) * (1 - after / before)
        return torch.cat([torch.zeros(1, dtype=torch.float64), variance.sqrt().clamp(min=self.last_width)])

    def mean(self, x: Tensor, t: Tensor, clean: Tensor) -> Tensor:
        """[M, D] the posterior's mean at step ``t`` [M], given the noisy point and the predicted clean point."""
        after, before = self.signal[t][:, None], self.signal[t - 1][:, None]
        of_clean = before.sqrt() * (1 - after / before) / (1 - after)
        of_noisy = (after / before).sqrt() * (1 - before) / (1 - after)
        return of_clean.to(x.dtype) * clean + of_noisy.to(x.dtype) * x

    def noisy(self, clean: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """[M, D] clean points after ``t`` [M] steps of noise: the inputs of a denoiser in training."""
        share = self.signal[t][:, None].to(clean.dtype)
        return share.sqrt() * clean + (1 - share).sqrt() * noise


class Chain(ABC):
    """The denoiser of M tokens, each with its own condition."""

    schedule: Schedule
    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float32

    @abstractmethod
    def mean(self, x: Tensor, t: int) -> Tensor:
        """[M, D] the mean of step ``t`` from points [M, D]."""

    @abstractmethod
    def select(self, rows: Tensor) -> Chain:
        """The chain of some of the tokens, by index."""

    def width(self, t: int) -> float:
        return float(self.schedule.widths[t])


@final
@dataclass(frozen=True, eq=False)
class Paths:
    """M paths."""

    points: Tensor
    """[T + 1, M, D]: entry t is x_t, entry 0 the token."""

    @property
    def tokens(self) -> Tensor:
        return self.points[0]


def fresh_noise(chain: Chain, chance: torch.Generator) -> Tensor:
    """[T + 1, M, D] random numbers of M paths: entry T is the start, entry t - 1 the noise of step t."""
    shape = (chain.schedule.num_steps + 1, chain.num_rows, chain.dim)
    return torch.randn(shape, generator=chance, dtype=chain.dtype)


def denoised(chain: Chain, noise: Tensor) -> Paths:
    """The paths that a chain makes from given random numbers."""
    x = noise[-1]
    points = [x]
    for t in range(chain.schedule.num_steps, 0, -1):
        x = chain.mean(x, t) + chain.width(t) * noise[t - 1]
        points.append(x)
    return Paths(torch.stack(points[::-1]))


def own_log_density(noise: Tensor) -> Tensor:
    """[M] the log-density of paths under the chain that made them from this noise: ``log_density`` without a pass."""
    return -noise[:-1].double().square().sum((0, -1)) / 2


def log_density(chain: Chain, paths: Paths) -> Tensor:
    """[M] the log-density of paths under a chain, up to a constant that all chains of one schedule share."""
    total = torch.zeros(paths.points.shape[1], dtype=torch.float64)
    for t in range(1, chain.schedule.num_steps + 1):
        off = (paths.points[t - 1] - chain.mean(paths.points[t], t)) / chain.width(t)
        total -= off.double().square().sum(-1) / 2
    return total
