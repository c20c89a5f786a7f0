"""Divergences of a draft's law q from the target's law p, used as losses, at each position.

    forward   KL(p || q) = sum p log(p / q)                 reverse   KL(q || p)
    jsd       b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q, b = 1/2
    tvd       1 - sum min(p, q): one minus the chance that a sampled guess is accepted (Leviathan et al. 2023)
    overlap   -log sum min(p, q)                            ce        -log q(argmax p)
    mixed     forward + tvd                                 l1-kl     0.9 sum |p - q| + 0.1 forward: DSpark's loss (DeepSeek-AI
              2026, arXiv 2607.05147), whose cross-entropy with the text has the same expectation up to a constant

The choice and its names follow DistillSpec (Zhou et al. 2023, arXiv 2310.08461). p is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest

_FLOOR = 1e-5


def _overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p.clamp(min=-80) - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p.clamp(min=-80))).sum(-1)


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    return 0.5 * (forward_kl(log_p, log_m) + forward_kl(log_q, log_m))


def tvd(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 1 - _overlap(log_p, log_q)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -_overlap(log_p, log_q).clamp(min=_FLOOR).log()


def hard(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True))[..., 0]


def mixed(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    return (p * (log_p.clamp(min=-80) - log_q)).sum(-1) + 1 - torch.minimum(p, q).sum(-1)


def l1_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.9 * (log_p.exp() - log_q.exp()).abs().sum(-1) + 0.1 * forward_kl(log_p, log_q)


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "overlap": overlap,
    "ce": hard,
    "mixed": mixed,
    "l1-kl": l1_kl,
}


def divergence(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss by name: [..., V] log p and log q -> [...]."""
    if name not in DIVERGENCES:
        raise OptionError(f"unknown loss {name!r}; {nearest(name, DIVERGENCES)}")
    return DIVERGENCES[name]
