"""Acceptance rules for continuous tokens: the draft drew a path, and the target keeps its end or replaces it by its own token.

    joint-path   exact. The whole path is the sample: keep with eta min(1, p(Y) / q(Y)); else draw target paths Y' until one is
                 kept with 1 - eta min(1, q(Y') / p(Y')). eta just below 1 bounds that loop.
    reflect      exact. The target's chain is coupled to the draft's at every step: it takes the draft's point with
                 min(1, N(x; mu_p) / N(x; mu_q)) and else the mirror image of its noise. No loop: where the ends differ, the
                 target's end is already a draw from the target.
    last-step    exact, and seldom keeps. The target runs its own chain on the draft's noise; only the last Gaussian is tested.
    published    LOSSY. As last-step with densities flattened by a temperature (42 in the released code): a test of similarity.

Wang et al. 2024, "Continuous Speculative Decoding", arXiv 2411.11925; coupling by reflection as in De Bortoli et al. 2025,
"Accelerated Diffusion Models via Speculative Sampling", arXiv 2501.05370. All this holds for widths that target and draft
share. Given the shared noise, each law of the last step is a Gaussian, and rejection sampling between the two is exact. The
width ratio of the paper is then 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.catalog import Catalog
from outrider.core.errors import OptionError
from outrider.images.continuous.interfaces import PathDraft, PathLaw, PathVerdict
from outrider.images.continuous.paths import Chain, Paths, denoised, fresh_noise, log_density, own_log_density


@final
@dataclass(frozen=True, eq=False)
class Tested:
    """The test's result for M drafted tokens, each on its own."""

    kept: Tensor
    """[M]"""
    own: Tensor | None = None
    """[M, D] the target's tokens in place of those that are not kept; None if they are still to be drawn."""
    num_paths: int = 1
    """Target paths that the test ran for each token, one after the other. (Evaluating a path takes one pass.)"""


@final
@dataclass(frozen=True, eq=False)
class Judged:
    """M tokens, each on its own: the draft's token if it was kept, else the target's."""

    tokens: Tensor
    """[M, D]"""
    kept: Tensor
    """[M]"""
    num_paths: Tensor
    """[M] target paths that were run one after the other."""


class PathRule(ABC):
    """Tests drafted paths and replaces rejected ones. ``walk`` is what a round calls; ``judge`` is for one token at a time."""

    lossless: ClassVar[bool]

    @abstractmethod
    def test(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Tested:
        """Test M paths at once, each on its own. ``drafted`` are the paths that ``q`` made from ``noise``. Both chains have M
        rows."""

    def recover(self, tested: Tested, rows: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """[R, D] the target's tokens in place of rejected ones, and [R] the paths run for them. The chains have R rows."""
        del p, q, chance
        assert tested.own is not None, "a rule whose test draws no token has a recovery of its own"
        return tested.own[rows], torch.zeros(len(rows), dtype=torch.int64)

    @final
    def judge(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Judged:
        """Judge every token on its own, and replace each rejected one."""
        tested = self.test(drafted, noise, p=p, q=q, chance=chance)
        tokens, paths = drafted.tokens.clone(), torch.full((p.num_rows,), tested.num_paths)
        rows = (~tested.kept).nonzero()[:, 0]
        found, more = self.recover(tested, rows, p=p.select(rows), q=q.select(rows), chance=chance)
        tokens[rows], paths[rows] = found, paths[rows] + more
        return Judged(tokens, tested.kept, paths)

    @final
    def walk(self, draft: PathDraft, law: PathLaw, chance: torch.Generator) -> PathVerdict:
        """Accept every row's guesses up to the first rejected one, which is replaced. A row without a rejection gets a bonus
        token."""
        count = len(draft.nodes)
        accepted, paths = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        tokens = torch.zeros_like(draft.nodes[:, 0])
        guesses = draft.guesses
        if guesses is not None:
            p, q = law.after(guesses.rows, guesses.depths), guesses.chain
            tested = self.test(guesses.paths, guesses.noise, p=p, q=q, chance=chance)
            kept = torch.zeros(draft.nodes.shape[:2], dtype=torch.int64)
            kept[guesses.rows, guesses.depths] = tested.kept.long()
            accepted = kept.cumprod(1).sum(1)
            first = (guesses.depths == accepted[guesses.rows]).nonzero()[:, 0]
            rows = guesses.rows[first]
            found, more = self.recover(tested, first, p=p.select(first), q=q.select(first), chance=chance)
            tokens[rows] = found
            judged = torch.minimum(accepted + 1, torch.tensor(draft.depth))
            paths = (judged * tested.num_paths).index_add(0, rows, more)
        full = accepted == torch.tensor(draft.depth)
        own = law.after(full.nonzero()[:, 0], accepted[full])
        tokens[full] = denoised(own, fresh_noise(own, chance)).tokens
        return PathVerdict(accepted, tokens, ~full, paths + full)


@final
@dataclass(frozen=True)
class JointPath(PathRule):
    """The path as a whole is accepted or rejected."""

    lossless: ClassVar = True
    eta: float = 0.99
    """Highest probability with which a path is kept. A rejected path then costs at most 1 / (1 - eta) paths on average."""
    max_tries: int = 2000
    """After this many tries the path is taken as it is. With eta 0.99 that has a probability below 1e-10."""

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1 or self.max_tries < 1:
            raise OptionError(
                f"eta = {self.eta}, max_tries = {self.max_tries} is not valid; use 0 < eta <= 1 and at least 1 try"
            )

    def test(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Tested:
        del q
        ratio = log_density(p, drafted) - own_log_density(noise)
        return Tested(torch.rand(p.num_rows, generator=chance) < self.eta * ratio.clamp(max=0).exp(), num_paths=0)

    def recover(self, tested: Tested, rows: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        del tested, rows
        tokens, tries = torch.zeros(p.num_rows, p.dim, dtype=p.dtype), torch.zeros(p.num_rows, dtype=torch.int64)
        open_rows = torch.arange(p.num_rows)
        for number in range(self.max_tries):
            if not len(open_rows):
                break
            tries[open_rows] += 1
            found, good = self._tried(p.select(open_rows), q.select(open_rows), chance)
            good |= number == self.max_tries - 1  # a target's own path, and never an empty token
            tokens[open_rows[good]] = found[good]
            open_rows = open_rows[~good]
        return tokens, tries

    def _tried(self, p: Chain, q: Chain, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """Fresh tokens of the target, and which of them are kept."""
        noise = fresh_noise(p, chance)
        paths = denoised(p, noise)
        covered = (log_density(q, paths) - own_log_density(noise)).clamp(max=0).exp()
        return paths.tokens, torch.rand(p.num_rows, generator=chance) >= self.eta * covered


@final
@dataclass(frozen=True)
class Reflect(PathRule):
    """Couples both chains by reflection: they take the same point if possible, and mirrored steps otherwise."""

    lossless: ClassVar = True

    def test(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Tested:
        del q
        x = drafted.points[-1]
        for t in range(p.schedule.num_steps, 0, -1):
            means = p.mean(x, t), _draft_mean(drafted, noise, t, p.width(t))
            x = _coupled(drafted.points[t - 1], noise[t - 1], means, p.width(t), chance)
        return Tested((x == drafted.tokens).all(-1), x)


@final
@dataclass(frozen=True)
class LastStep(PathRule):
    """Runs the target's own chain on the draft's noise, and couples the last step alone."""

    lossless: ClassVar = True
    shared: bool = True
    """Whether the target's chain runs on the draft's noise. If it does not, the chains end far apart."""

    def test(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Tested:
        del q
        own = denoised(p, noise if self.shared else fresh_noise(p, chance))
        means = p.mean(own.points[1], 1), _draft_mean(drafted, noise, 1, p.width(1))
        x = _coupled(drafted.tokens, noise[0], means, p.width(1), chance)
        return Tested((x == drafted.tokens).all(-1), x)


@final
@dataclass(frozen=True)
class Published(PathRule):
    """The released test: keeps a token that is similar to the target's own token from the same noise."""

    lossless: ClassVar = False
    temperature: float = 42.0
    """Divides the log-densities in the test. 1 is the exact test."""
    max_tries: int = 100
    """Draws of the last step after a rejection. If all fail, the last one stays; the released code leaves zeros there."""

    def __post_init__(self) -> None:
        if not self.temperature >= 1:
            raise OptionError(f"temperature = {self.temperature} is not valid; use 1 (lossless) or more")

    def test(self, drafted: Paths, noise: Tensor, *, p: Chain, q: Chain, chance: torch.Generator) -> Tested:
        del q
        own = denoised(p, noise)
        means = p.mean(own.points[1], 1), _draft_mean(drafted, noise, 1, p.width(1))
        ratio = _log_ratio(drafted.tokens, *means, self.temperature * p.width(1))
        kept = torch.rand(p.num_rows, generator=chance) < ratio.clamp(max=0).exp()
        return Tested(kept, self._residual(*means, p.width(1), chance))

    def _residual(self, mean_p: Tensor, mean_q: Tensor, width: float, chance: torch.Generator) -> Tensor:
        """[M, D] last steps of the target, drawn until one is kept with probability 1 - q / p. After the last try the step is
        taken as it is."""
        found = torch.empty_like(mean_p)
        waiting = torch.ones(len(mean_p), dtype=torch.bool)
        for _ in range(self.max_tries):
            point = mean_p + width * torch.randn(mean_p.shape, generator=chance, dtype=mean_p.dtype)
            found = torch.where(waiting[:, None], point, found)
            covered = (-_log_ratio(point, mean_p, mean_q, width)).clamp(max=0).exp()
            waiting &= torch.rand(len(point), generator=chance) < covered
        return found


PATH_RULES: Catalog[type[PathRule]] = Catalog(
    "rule of continuous tokens",
    {"joint-path": JointPath, "reflect": Reflect, "last-step": LastStep, "published": Published},
)


def _draft_mean(drafted: Paths, noise: Tensor, t: int, width: float) -> Tensor:
    """[M, D] the mean of the draft's step ``t``, computed from the step it took, without a pass of the draft."""
    return drafted.points[t - 1] - width * noise[t - 1]


def _coupled(point: Tensor, noise: Tensor, means: tuple[Tensor, Tensor], width: float, chance: torch.Generator) -> Tensor:
    """[M, D] draws from N(mean_p, width) that equal ``point`` = mean_q + width * noise as often as possible."""
    mean_p, mean_q = means
    kept = torch.rand(len(point), generator=chance) < _log_ratio(point, mean_p, mean_q, width).clamp(max=0).exp()
    return torch.where(kept[:, None], point, _mirrored(noise, mean_p, mean_q, width))


def _log_ratio(point: Tensor, mean_p: Tensor, mean_q: Tensor, width: float) -> Tensor:
    """[M] log N(point; mean_p, width) - log N(point; mean_q, width)."""
    to_p, to_q = (((point - mean).double() / width).square().sum(-1) for mean in (mean_p, mean_q))
    return (to_q - to_p) / 2


def _mirrored(noise: Tensor, mean_p: Tensor, mean_q: Tensor, width: float) -> Tensor:
    """[M, D] the target's step with the draft's noise mirrored along the line between the means."""
    along = torch.nn.functional.normalize(mean_p - mean_q, dim=-1)
    return mean_p + width * (noise - 2 * (noise * along).sum(-1, keepdim=True) * along)
