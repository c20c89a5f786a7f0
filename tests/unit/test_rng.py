"""The generator: pinned numbers, independence of batch and slot, and the statistics a sampler relies on.

All keys are fixed, so no test can fail by chance; the bounds are those a good generator meets with room to spare.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.core.random_source import RandomSource, enumerate_law
from outrider.core.rng import Noise, Purpose, exponential_stream, gumbel_stream, make_key, mix, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def noise_of(seeds: list[int], positions: list[int]) -> Noise:
    return Noise(torch.tensor(seeds), torch.tensor(positions))


# --- known answers: a change of the generator changes every seeded text, so it must be noticed --------------------------


def mix_by_hand(word: int) -> int:
    """SplitMix64's finaliser in Python's integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def uniform_by_hand(seed: int, position: int, purpose: int, lane: int, index: int = 1) -> float:
    key = mix_by_hand((seed + GOLDEN) & MASK)
    key = mix_by_hand((key + position * GOLDEN + purpose) & MASK)
    key = mix_by_hand((key + (lane + 1) * GOLDEN) & MASK)
    return ((mix_by_hand((key + index * GOLDEN) & MASK) >> 12) + 0.5) * 2.0**-52


def test_published_outputs_of_splitmix64() -> None:
    """The first outputs of the reference generator with seed 0."""
    words = mix(torch.arange(1, 4) * (GOLDEN - (1 << 64)))
    assert [int(word) & MASK for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("seed", "position", "accept_1", "accept_2"),
    [
        (0, 0, 0.91479125411995665, 0.20551531055488226),
        (1, 1, 0.63638719806145982, 0.23642378478746517),
        (-7, 100, 0.20347445720096113, 0.32008156679662869),
        (1 << 62, 31999, 0.78695355613827689, 0.30527230221487478),
    ],
)
def test_pinned_uniform(seed: int, position: int, accept_1: float, accept_2: float) -> None:
    found = noise_of([seed], [position]).uniform(Purpose.ACCEPT, torch.tensor([[1, 2]]))[0].tolist()
    assert found == [accept_1, accept_2]
    assert found == [uniform_by_hand(seed, position, int(Purpose.ACCEPT), lane) for lane in (1, 2)]


def test_pinned_gumbel_and_exponential() -> None:
    noise = noise_of([0, -7], [0, 100])
    gumbel = noise.target_gumbel(torch.tensor([[0, 3], [0, 3]]), 2).flatten().tolist()
    expected = [4.442187786, -0.383653611, 0.546672404, 1.000019193, -0.883954465, 1.661325216, 1.084941268, -0.828042090]
    assert gumbel == pytest.approx(expected, abs=1e-6)
    race = noise.exponential(Purpose.RESIDUAL, torch.tensor([[0], [0]]), 2).flatten().tolist()
    assert race == pytest.approx([1.08194887987, 0.10203974013, 0.11400038171, 1.62548728899], abs=1e-10)
    assert race[1] == pytest.approx(-math.log(uniform_by_hand(0, 0, int(Purpose.RESIDUAL), 0, index=2)), abs=1e-12)


def test_the_ends_are_open() -> None:
    """No number is 0 or 1, so no logarithm is infinite."""
    extremes = uniform(torch.tensor([0, -1, 1 << 12, (1 << 63) - 1, -(1 << 63)]))
    assert extremes.min() > 0
    assert extremes.max() < 1
    assert torch.isfinite(torch.log(-torch.log(extremes)).float()).all()


# --- a number belongs to its key and to nothing else --------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_slot() -> None:
    seeds, positions = [5, 99, -3, 5], [0, 7, 7, 1]
    together, lanes = noise_of(seeds, positions), torch.tensor([[0, 4, 9]])
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        alone = noise_of([seed], [position])
        for purpose in Purpose:
            assert torch.equal(together.uniform(purpose, lanes)[row], alone.uniform(purpose, lanes)[0])
            assert torch.equal(together.gumbel(purpose, lanes, 11)[row], alone.gumbel(purpose, lanes, 11)[0])
            assert torch.equal(together.exponential(purpose, lanes, 11)[row], alone.exponential(purpose, lanes, 11)[0])
        assert torch.equal(together.target_gumbel(lanes, 11)[row], alone.target_gumbel(lanes, 11)[0])


def test_target_noise_belongs_to_the_output_position() -> None:
    """Depth 3 of a round that starts at 4 is depth 0 of one that starts at 7, and a larger vocabulary changes nothing."""
    early, late = noise_of([8], [4]), noise_of([8], [7])
    assert torch.equal(early.target_gumbel(torch.tensor([[3]]), 50), late.target_gumbel(torch.tensor([[0]]), 50))
    assert torch.equal(early.target_gumbel(torch.tensor([[3]]), 90)[..., :50], early.target_gumbel(torch.tensor([[3]]), 50))


def test_other_noise_belongs_to_the_round() -> None:
    early, late = noise_of([8], [4]), noise_of([8], [5])
    assert not torch.equal(
        early.uniform(Purpose.ACCEPT, torch.tensor([[2]])), late.uniform(Purpose.ACCEPT, torch.tensor([[1]]))
    )


# --- statistics ---------------------------------------------------------------------------------------------------------

COUNT = 1 << 16


def family(name: str) -> Tensor:
    """COUNT uniform numbers whose keys differ in one word only, neighbour by neighbour."""
    steps, zero = torch.arange(COUNT), torch.zeros(1, dtype=torch.int64)
    keys = {
        "seeds": lambda: make_key(steps, zero, Purpose.ACCEPT, 1),
        "positions": lambda: make_key(zero, steps, Purpose.ACCEPT, 1),
        "lanes": lambda: make_key(zero, zero, Purpose.ACCEPT, steps),
    }
    if name == "stream":
        return torch.exp(-exponential_stream(make_key(zero, zero, Purpose.TARGET), COUNT)[0])
    return uniform(mix(keys[name]() + (GOLDEN - (1 << 64))))


FAMILIES = ["seeds", "positions", "lanes", "stream"]


def chi_square(cells: Tensor, num_cells: int) -> float:
    """Standard deviations between the chi-square of the cell counts and its mean."""
    expected = len(cells) / num_cells
    statistic = float(((torch.bincount(cells, minlength=num_cells) - expected) ** 2 / expected).sum())
    return (statistic - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_uniform(name: str) -> None:
    numbers = family(name)
    assert abs(chi_square((numbers * 64).long(), 64)) < 4
    assert abs(chi_square((numbers * 2**20).long() % 64, 64)) < 4  # lower bits as well
    assert float(numbers.mean()) == pytest.approx(0.5, abs=4 * 0.2887 / math.sqrt(COUNT))


@pytest.mark.parametrize("apart", [1, 2, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_are_independent(name: str, apart: int) -> None:
    numbers = family(name)
    here, there = numbers[:-apart], numbers[apart:]
    assert abs(float(torch.corrcoef(torch.stack([here, there]))[0, 1])) < 4 / math.sqrt(COUNT)
    assert abs(chi_square((here * 8).long() * 8 + (there * 8).long(), 64)) < 4


def test_families_are_independent_of_each_other() -> None:
    together = torch.corrcoef(torch.stack([family(name) for name in FAMILIES])) - torch.eye(len(FAMILIES))
    assert float(together.abs().max()) < 4 / math.sqrt(COUNT)


def test_purposes_are_independent() -> None:
    steps = torch.arange(COUNT)
    numbers = torch.stack([uniform(make_key(torch.zeros_like(steps), steps, purpose)) for purpose in Purpose])
    assert float((torch.corrcoef(numbers) - torch.eye(len(Purpose))).abs().max()) < 4 / math.sqrt(COUNT)


def test_no_key_is_met_twice() -> None:
    """Small seeds, positions, purposes and lanes, as requests really have them."""
    grid = torch.cartesian_prod(torch.arange(16), torch.arange(64), torch.arange(16))
    keys = torch.cat([make_key(grid[:, 0], grid[:, 1], purpose, grid[:, 2]) for purpose in Purpose])
    assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize("race", ["gumbel", "exponential"])
def test_choices_follow_the_weights(race: str) -> None:
    """argmax(log w + gumbel) and argmax(w / exponential) are draws from w, over positions with one seed."""
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    keys = make_key(torch.tensor([3]), torch.arange(COUNT), Purpose.TARGET)
    if race == "gumbel":
        drawn = (weights.log() + gumbel_stream(keys, 5)).argmax(-1)
    else:
        drawn = (weights / exponential_stream(keys, 5)).argmax(-1)
    counts = torch.bincount(drawn, minlength=5)
    assert counts[4] == 0
    expected = weights[:4] * COUNT
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 3 + 4 * math.sqrt(6)
    follows = drawn[:-1] * 4 + drawn[1:]  # the choice at a position says nothing about the next one
    expected = (weights[:4, None] * weights[:4]).flatten() * (COUNT - 1)
    assert float(((torch.bincount(follows, minlength=16) - expected) ** 2 / expected).sum()) < 15 + 4 * math.sqrt(30)


# --- the enumerating source ---------------------------------------------------------------------------------------------


def test_a_lane_is_one_number() -> None:
    """Asked again it answers from the same number, with whatever probability; another lane is independent of it."""

    def questions(source: RandomSource) -> tuple[bool, ...]:
        return source.bernoulli(0.3, 1), source.bernoulli(0.3, 1), source.bernoulli(0.6, 1), source.bernoulli(0.5, 2)

    law = enumerate_law(questions)
    assert law == {
        (True, True, True, True): pytest.approx(0.15),
        (True, True, True, False): pytest.approx(0.15),
        (False, False, True, True): pytest.approx(0.15),
        (False, False, True, False): pytest.approx(0.15),
        (False, False, False, True): pytest.approx(0.2),
        (False, False, False, False): pytest.approx(0.2),
    }


def test_enumerated_draws() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    assert enumerate_law(lambda source: source.categorical(weights, 0)) == {1: 0.25, 2: 0.75}
    twice = enumerate_law(lambda source: (source.target_choice(weights, 5), source.target_choice(weights, 5)))
    assert twice == {(1, 1): 0.25, (2, 2): 0.75}
    apart = enumerate_law(lambda source: (source.target_choice(weights, 5), source.categorical(weights, 5)))
    assert apart == {(1, 1): 0.0625, (1, 2): 0.1875, (2, 1): 0.1875, (2, 2): 0.5625}
