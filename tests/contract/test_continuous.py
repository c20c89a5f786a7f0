"""Continuous tokens: exact rules return the target's law (against the distance of two target runs), and say what they keep."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Cache
from outrider.core.request import Origin
from outrider.images.continuous.decode import ContinuousSettings, PathWriter, write_plain
from outrider.images.continuous.interfaces import ContinuousTarget
from outrider.images.continuous.model import (
    ContinuousShape,
    DiffusionModel,
    Network,
    diffusion_loss,
    save_network,
)
from outrider.images.continuous.paths import Chain, Paths, Schedule, denoised, fresh_noise, log_density, own_log_density
from outrider.images.continuous.rules import (
    PATH_RULES,
    JointPath,
    Judged,
    LastStep,
    PathRule,
    Published,
    Reflect,
)

SCHEDULE = Schedule(12, last_width=0.1)
COUNT = 4000
EXACT: dict[str, PathRule] = {
    "joint-path": JointPath(),
    "joint-path, eta 1": JointPath(eta=1.0),
    "reflect": Reflect(),
    "last-step": LastStep(),
    "last-step, own noise": LastStep(shared=False),
    "published, temperature 1": Published(temperature=1.0),
}

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixture(Chain):
    """The exact denoiser of a mixture of two points that are blurred by ``blur``; both stand at +-1 around a centre."""

    def __init__(self, centres: Tensor, weight: float, schedule: Schedule = SCHEDULE, blur: float = 0.3) -> None:
        self.centres, self.weight, self.schedule, self.blur = centres, weight, schedule, blur
        self.num_rows, self.dim = centres.shape

    def mean(self, x: Tensor, t: int) -> Tensor:
        share = float(self.schedule.signal[t])
        total = share * self.blur**2 + 1 - share
        ups = torch.stack([self.centres - 1, self.centres + 1])
        logs = -(x - share**0.5 * ups).square().sum(-1) / (2 * total)
        logs += torch.tensor([1 - self.weight, self.weight]).log()[:, None]
        clean = ups + share**0.5 * self.blur**2 / total * (x - share**0.5 * ups)
        clean = (logs.softmax(0)[..., None] * clean).sum(0)
        return self.schedule.mean(x, torch.full((len(x),), t), clean)

    def select(self, rows: Tensor) -> Mixture:
        return Mixture(self.centres[rows], self.weight, self.schedule, self.blur)


def ks(a: Tensor, b: Tensor) -> float:
    """The largest distance of two empirical distribution functions, over three directions of [N, D] points."""
    directions = [*torch.eye(a.shape[1])[:2].tolist(), [1.0] * a.shape[1]]
    return max(_ks(a @ torch.tensor(one), b @ torch.tensor(one)) for one in directions)


def _ks(a: Tensor, b: Tensor) -> float:
    places = torch.cat([a, b]).sort().values
    shares = [torch.searchsorted(one.sort().values, places, right=True) / len(one) for one in (a, b)]
    return float((shares[0] - shares[1]).abs().max())


def energy(a: Tensor, b: Tensor) -> float:
    """Energy distance: an MMD with the kernel -|x - y|."""
    a, b = a[:1500], b[:1500]
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def judged(rule: PathRule, p: Chain, q: Chain, seed: int = 0) -> tuple[Judged, Paths]:
    chance = torch.Generator().manual_seed(seed)
    noise = fresh_noise(q, chance)
    drafted = denoised(q, noise)
    return rule.judge(drafted, noise, p=p, q=q, chance=chance), drafted


def pair(dim: int = 2, count: int = COUNT) -> tuple[Mixture, Mixture]:
    """A target, and a draft with other weights whose points are shifted."""
    return Mixture(torch.zeros(count, dim), 0.5), Mixture(torch.full((count, dim), 0.05), 0.3)


@pytest.mark.parametrize("name", EXACT)
def test_exact_rules_return_the_targets_law(name: str) -> None:
    """KS and energy distance to a target run, against those of two target runs; the draft itself is far off."""
    p, q = pair()
    found, drafted = judged(EXACT[name], p, q, seed=3)
    runs = [denoised(p, fresh_noise(p, torch.Generator().manual_seed(seed))).tokens for seed in (11, 12, 13)]
    floor = max(ks(runs[0], runs[1]), ks(runs[0], runs[2]), ks(runs[1], runs[2]))
    mine = ks(found.tokens, runs[0])
    print(f"{name}: KS {mine:.4f}, noise floor {floor:.4f}, draft {ks(drafted.tokens, runs[0]):.4f}")
    assert ks(drafted.tokens, runs[0]) > 0.1
    assert mine < 1.95 * math.sqrt(2 / COUNT), "above what two runs differ by once in a thousand times"
    assert energy(found.tokens, runs[0]) < 4 * max(energy(runs[0], runs[1]), 0.002)
    assert bool((found.tokens[found.kept] == drafted.tokens[found.kept]).all())


def test_the_published_rule_is_lossy() -> None:
    """It keeps nearly everything, and so returns nearly the draft's law."""
    p, q = pair()
    found, _ = judged(Published(), p, q, seed=3)
    run = denoised(p, fresh_noise(p, torch.Generator().manual_seed(11))).tokens
    assert not Published.lossless and float(found.kept.float().mean()) > 0.8
    assert ks(found.tokens, run) > 0.1


@pytest.mark.parametrize("rule", [Reflect(), LastStep(), JointPath(eta=1.0)])
def test_one_gaussian_step_keeps_one_minus_the_total_variation(rule: PathRule) -> None:
    """With one step the laws given the start are Gaussians at distance d: 1 - TV = 2 Phi(-d / 2)."""
    schedule = Schedule(1, last_width=0.5)
    p, q = (Constant(torch.full((20_000, 3), at), schedule) for at in (0.0, 0.2))
    kept = float(judged(rule, p, q)[0].kept.float().mean())
    gap = 0.2 * math.sqrt(3) / float(schedule.widths[1])
    assert kept == pytest.approx(math.erfc(gap / 2 / math.sqrt(2)), abs=0.012)


class Constant(Chain):
    """Steps to a fixed mean."""

    def __init__(self, means: Tensor, schedule: Schedule) -> None:
        self.means, self.schedule = means, schedule
        self.num_rows, self.dim = means.shape

    def mean(self, x: Tensor, t: int) -> Tensor:
        return self.means

    def select(self, rows: Tensor) -> Constant:
        return Constant(self.means[rows], self.schedule)


def test_reflection_has_more_in_common_than_the_last_step() -> None:
    p, q = pair(count=2000)
    kept = {name: float(judged(rule, p, q)[0].kept.float().mean()) for name, rule in EXACT.items()}
    print(kept)
    assert kept["reflect"] > kept["last-step"] > 2 * kept["last-step, own noise"] > 0
    assert kept["joint-path, eta 1"] > kept["joint-path"] > kept["last-step"]


def test_joint_path_runs_one_residual_path_per_token() -> None:
    """On average, whatever the draft; and a draft equal to the target is kept with eta."""
    p, q = pair()
    found, _ = judged(JointPath(), p, q)
    assert float(found.num_paths.float().mean()) == pytest.approx(1.0, abs=0.12)
    same, _ = judged(JointPath(eta=0.9), p, p)
    assert float(same.kept.float().mean()) == pytest.approx(0.9, abs=0.015)


def test_a_cap_gives_a_target_token_and_never_an_empty_one() -> None:
    p, q = pair(count=500)
    for rule in (JointPath(max_tries=1), Published(temperature=1.0, max_tries=1)):
        found, _ = judged(rule, p, q)
        assert int(found.num_paths.max()) <= 1 and bool((found.tokens.abs().sum(-1) > 0).all())


def test_densities_of_paths() -> None:
    """The ratio of two chains' densities is the sum over steps, restated."""
    p, q = pair(count=3)
    paths = denoised(q, fresh_noise(q, torch.Generator().manual_seed(1)))
    expected = torch.zeros(3, dtype=torch.float64)
    for t in range(1, 13):
        for chain, sign in ((p, 1), (q, -1)):
            law = torch.distributions.Normal(chain.mean(paths.points[t], t), chain.width(t))
            expected += sign * law.log_prob(paths.points[t - 1]).double().sum(-1)
    torch.testing.assert_close(log_density(p, paths) - log_density(q, paths), expected, atol=1e-3, rtol=1e-3)
    noise = fresh_noise(q, torch.Generator().manual_seed(1))
    torch.testing.assert_close(own_log_density(noise), log_density(q, paths), atol=1e-3, rtol=1e-4)


# --- whole images -----------------------------------------------------------------------------------------------------


class Walk(ContinuousTarget):
    """Three tokens: each stands around half of the one before it, so that an early mistake shows in the last one."""

    num_tokens, dim, num_classes, schedule = 3, 2, 1, Schedule(6, last_width=0.2)

    def __init__(self, weight: float, shift: float) -> None:
        self.weight, self.shift = weight, shift

    def new_cache(self, batch_size: int) -> ContiguousCache:
        return ContiguousCache.empty(0, (batch_size, 1, 1), dtype=torch.float32, device=torch.device("cpu"))

    def score(self, nodes: Tensor, labels: Tensor, cache: Cache) -> Tensor:
        places = torch.tensor(cache.lengths)[:, None] + torch.arange(nodes.shape[1])
        cache.reserve(nodes.shape[1])
        return torch.where((places == 0)[..., None], labels[:, None, None].float(), nodes / 2) + self.shift

    def chain(self, conditions: Tensor) -> Mixture:
        return Mixture(conditions, self.weight, self.schedule)


@pytest.mark.parametrize("rule", [JointPath(), Reflect(), LastStep()])
@pytest.mark.parametrize("settings", [ContinuousSettings(2), ContinuousSettings(4, prefill=0.4)])
def test_whole_images_have_the_targets_law(rule: PathRule, settings: ContinuousSettings) -> None:
    labels, target, draft = torch.zeros(2500, dtype=torch.int64), Walk(0.5, 0.0), Walk(0.35, 0.05)
    found = PathWriter(target, draft, rule, settings).write(labels, torch.Generator().manual_seed(2))
    runs = [write_plain(target, labels, torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    for place in range(3):
        assert ks(found.tokens[:, place], runs[0][:, place]) < 1.95 * math.sqrt(2 / 2500)
    together = [run.flatten(1)[:, [0, 4]] for run in (found.tokens, *runs)]
    assert energy(together[0], together[1]) < 4 * max(energy(together[1], together[2]), 0.003)
    passes = [row.stats.num_passes for row in found.rows]
    assert max(passes) <= 3 and sum(passes) < 2.9 * len(passes)
    for row in found.rows:
        assert len(row.rounds) == len(row.origins) == row.stats.num_tokens == 3
        assert row.origins.count(Origin.ACCEPTED) == row.stats.num_accepted <= row.stats.num_tested <= row.stats.num_drafted


def test_a_draft_equal_to_the_target_writes_in_one_pass() -> None:
    model = Walk(0.5, 0.0)
    found = PathWriter(model, model, Reflect(), ContinuousSettings(3)).write(torch.zeros(5).long(), torch.Generator())
    assert [row.stats.num_passes for row in found.rows] == [1] * 5
    assert [row.origins for row in found.rows] == [[Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS]] * 5


# --- the network ------------------------------------------------------------------------------------------------------


def test_the_network_learns_and_is_saved(tmp_path: Path) -> None:
    """Tokens that are all alike: the loss falls, and the loaded model writes them."""
    torch.manual_seed(0)
    shape = ContinuousShape(num_tokens=3, dim=2, num_classes=2, width=16, num_layers=1, num_heads=2, head_width=16)
    network, chance = Network(shape), torch.Generator().manual_seed(0)
    tokens, labels = torch.full((32, 3, 2), 0.5), torch.zeros(32, dtype=torch.int64)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    first = float(diffusion_loss(network, tokens, labels, chance).detach())
    for _ in range(100):
        loss = diffusion_loss(network, tokens, labels, chance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first / 2
    save_network(network, tmp_path / "a", {})
    model = DiffusionModel.load(tmp_path / "a", Schedule(10))
    written = write_plain(model, torch.zeros(8, dtype=torch.int64), torch.Generator().manual_seed(1))
    assert written.shape == (8, 3, 2) and float((written - 0.5).abs().mean()) < 0.25


def test_conditions_are_causal() -> None:
    network = Network(ContinuousShape(width=24, num_layers=2, num_heads=2))
    tokens, labels = torch.randn(2, 15, 4), torch.tensor([1, 2])
    changed = tokens.clone()
    changed[:, 9] += 1
    before, after = network.conditions(tokens, labels), network.conditions(changed, labels)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'joint-path'"):
        PATH_RULES["joint-paht"]
    with pytest.raises(OptionError, match="eta = 0"):
        JointPath(eta=0.0)
    with pytest.raises(OptionError, match="width above 0"):
        Schedule(4, last_width=0.0)
    with pytest.raises(OptionError, match="window from 1 on"):
        ContinuousSettings(0)
    with pytest.raises(OptionError, match=r"use 1 .lossless. or more"):
        Published(temperature=0.5)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no continuous image model"):
        DiffusionModel.load(tmp_path, SCHEDULE)
    other = Walk(0.5, 0.0)
    other.num_tokens = 4
    with pytest.raises(OptionError, match="train both with one recipe"):
        PathWriter(Walk(0.5, 0.0), other, Reflect())
