"""Speculative Jacobi decoding: the law of whole texts by enumeration, through the engine, and what waits between rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor
from toy_laws import random_model, total_variation

from outrider.acceptance import Block, Rejection
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import AcceptanceRule, Context, Observation, Plan, RowDraft, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.random_source import RandomSource, enumerate_law
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Law, Sampler
from outrider.core.scores import Scores
from outrider.core.verdict import RowVerdict, Verdict
from outrider.drafters.itself import jacobi_window
from outrider.drafters.itself.jacobi_window import JacobiWindow, WindowOptions
from outrider.drafters.itself.sjd import SpeculativeJacobi
from outrider.drafters.itself.sjd_coupled import CoupledJacobi
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.images.guidance import Guided
from outrider.methods import compose
from outrider.models.tiny import TableModel
from outrider.policies.fixed import Fixed, FixedOptions

EXACT = 1e-12
SAMPLED = SamplingParams(max_tokens=3, temperature=1.0, seed=0)

pytestmark = pytest.mark.usefixtures("one_thread")


@final
class Asking(AcceptanceRule):
    """A rule in its scalar form, for one row, with a source that the test holds. No two questions share a number."""

    exact_for: ClassVar = (Draws.IID, Draws.BEAM)
    shape: ClassVar = Shape.CHAIN
    lossless: ClassVar = True

    def __init__(self, inner: AcceptanceRule, source: RandomSource) -> None:
        self.inner, self.source, self.num_rounds = inner, source, 0

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        del noise
        self.num_rounds += 1
        found = self.inner.walk_row(RowDraft.of(draft, law, 0), Shifted(self.source, 100 * self.num_rounds))
        path = torch.tensor([[*found.path, 0]])
        return Verdict(path, torch.tensor([len(found.path)]), torch.tensor([found.next_token]), torch.tensor([found.rejected]))

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        return self.inner.walk_row(row, source)


@final
class Shifted(RandomSource):
    """A source whose lanes begin later."""

    def __init__(self, inner: RandomSource, first: int) -> None:
        self.inner, self.first = inner, first

    def bernoulli(self, probability: float, lane: int) -> bool:
        return self.inner.bernoulli(probability, self.first + lane)

    def categorical(self, weights: Tensor, lane: int) -> int:
        return self.inner.categorical(weights, self.first + lane)

    def target_choice(self, probs: Tensor, depth: int) -> int:
        return self.inner.target_choice(probs, self.first + depth)


def texts_of(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    *,
    fill: str = "last",
    window: int = 2,
    rule: AcceptanceRule | None = None,
    params: SamplingParams = SAMPLED,
    drafter: type[JacobiWindow] = SpeculativeJacobi,
) -> dict[tuple[int, ...], float]:
    """The law of what the engine writes with the real drafter, over all branches of drafting and testing."""

    def text(source: RandomSource) -> tuple[int, ...]:
        def drawn(laws: Tensor, noise: Noise, lanes: Tensor) -> Tensor:
            """A number for every key that the drafter asks for; the same key gets the same number again."""
            keys = zip(laws, noise.positions.tolist(), lanes[:, 0].tolist(), strict=True)
            return torch.tensor([source.categorical(law, 10_000 + 100 * place + lane) for law, place, lane in keys])

        monkeypatch.setattr(jacobi_window, "drawn", drawn)
        made = drafter(WindowOptions(fill=fill), dtype=torch.float64)
        method = Method(made, Asking(rule or Rejection(), source), Fixed(FixedOptions(num_draft_tokens=window)))
        (*_, last) = run(Engine(target, method), [Request([0], params)], max_batch_size=1)
        return tuple(last.state.output_ids)

    found = enumerate_law(text)
    assert abs(math.fsum(found.values()) - 1) < 1e-9
    return found


def law_of_texts(law: Callable[[tuple[int, ...]], Tensor], length: int = 3) -> dict[tuple[int, ...], float]:
    """Every text after token 0, with its probability."""
    begun: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        begun = {(*t, v): w * float(pv) for t, w in begun.items() for v, pv in enumerate(law((0, *t))) if pv > 0}
    return begun


def table(law: Callable[[tuple[int, ...]], Tensor]) -> TableModel:
    return TableModel(lambda context: law(tuple(context)))


@pytest.mark.parametrize("fill", ["last", "uniform", "point"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_engine_writes_the_targets_law(monkeypatch: pytest.MonkeyPatch, fill: str, window: int) -> None:
    law = random_model(window, 2)
    assert total_variation(texts_of(monkeypatch, table(law), fill=fill, window=window), law_of_texts(law)) < EXACT


@pytest.mark.parametrize("fill", ["last", "uniform"])
@pytest.mark.parametrize("window", [1, 2])
def test_places_that_keep_their_numbers(monkeypatch: pytest.MonkeyPatch, fill: str, window: int) -> None:
    """Exact too, where the rule judges from the top down."""
    law = random_model(window, 2)
    found = texts_of(monkeypatch, table(law), fill=fill, window=window, drafter=CoupledJacobi)
    assert total_variation(found, law_of_texts(law)) < EXACT


def test_looking_ahead_at_numbers_that_are_used_again_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why block verification is refused for places that keep their numbers."""
    law = random_model(6, 2)
    found = texts_of(monkeypatch, table(law), rule=Block(), drafter=CoupledJacobi)
    assert total_variation(found, law_of_texts(law)) > 1e-6
    with pytest.raises(CompositionError, match="Block"):
        compose("sjd-coupled", table(law), acceptance="block")


def test_three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    law = random_model(5, 3)
    assert total_variation(texts_of(monkeypatch, table(law), window=1), law_of_texts(law)) < EXACT


def test_a_rule_that_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    law = random_model(6, 2)
    assert total_variation(texts_of(monkeypatch, table(law), rule=Block()), law_of_texts(law)) < EXACT


def test_guidance_changes_nothing_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes, one class, no class: the engine writes the guided law."""
    plain = random_model(7, 4, concentration=2.0)
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=0, banned_token_ids=[0, 3])

    def law(context: tuple[int, ...]) -> Tensor:
        with_class, without = plain(context).log(), plain((3, *context[1:])).log()
        mixed = without + 2.5 * (with_class - without)
        mixed[[0, 3]] = -torch.inf
        return torch.softmax(mixed, -1)

    guided = Guided(table(plain), scale=2.5, classes=range(1), nothing=3)  # 0 is the class; 1 and 2 are codes
    found = texts_of(monkeypatch, guided, window=1, params=params)
    assert total_variation(found, law_of_texts(law, 2)) < EXACT


def test_a_wrong_q_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: each guess is tested against the law of its neighbour."""
    whole = SpeculativeJacobi.propose

    def wrong(self: SpeculativeJacobi, *arguments: Any) -> Draft:
        draft = whole(self, *arguments)
        assert draft.q is not None
        return Draft(draft.tree, draft.draws, draft.q.roll(1, 1))

    monkeypatch.setattr(SpeculativeJacobi, "propose", wrong)
    law = random_model(2, 2)
    assert total_variation(texts_of(monkeypatch, table(law), fill="uniform"), law_of_texts(law)) > 1e-3


def test_what_waits_is_drawn_from_the_laws_of_the_pass() -> None:
    """After two accepted guesses of five, three places wait: each with the law that the pass gave there."""
    rows = [RequestState.of(Request([1, 2], SamplingParams(temperature=0.7, seed=3)))]
    sampler = Sampler(rows, 9, torch.device("cpu"))
    noise = Noise(torch.tensor([3]), torch.tensor([0]))
    context = Context([[1, 2]], sampler, noise, torch.device("cpu"))
    drafter = SpeculativeJacobi()
    state = drafter.start([[1, 2]], {})
    draft = drafter.propose(state, context, Plan((5,), (5,)))
    assert draft.q is not None and torch.allclose(draft.q[0, :5], torch.full((5, 9), 1 / 9))
    logits = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(1))
    drafter.observe(state, Observation(draft, Scores(logits), [[0, 1, 2]], [2], 0.0, 0.0))
    laws = sampler.law(logits, draft.tree, noise).probs[0]
    again = drafter.propose(state, Context([[1, 2, 4, 5, 6]], sampler, noise, torch.device("cpu")), Plan((5,), (5,)))
    assert again.q is not None
    torch.testing.assert_close(again.q[0, :5], laws[[3, 4, 5, 5, 5]])
    assert all(float(again.q[0, i, again.tree.tokens[0, i + 1]]) > 0 for i in range(5))


def test_sampled_texts_have_the_targets_law() -> None:
    """The production numbers: the empirical law of 1,500 texts is as near to the target's as that of plain sampling."""
    model = TableModel.random(3, seed=4, sharpness=1.2)
    law = law_of_texts(lambda context: model.law(list(context)))
    distances = {}
    for name in ("sjd", "sjd-coupled", "plain"):
        method = compose(name, model, options={} if name == "plain" else {"num_draft_tokens": 2})
        requests = [Request([0], SamplingParams(max_tokens=3, temperature=1.0, seed=i)) for i in range(1500)]
        counts: Counter[tuple[int, ...]] = Counter()
        for step in run(Engine(model, method), requests, max_batch_size=500):
            if step.state.is_finished:
                counts[tuple(step.state.output_ids)] += 1
        distances[name] = total_variation({text: count / 1500 for text, count in counts.items()}, law)
    assert max(distances["sjd"], distances["sjd-coupled"]) < 1.6 * distances["plain"] + 0.01, distances


def test_refusals() -> None:
    model = TableModel.random(3, seed=1)
    with pytest.raises(OptionError, match="did you mean 'uniform'"):
        compose("sjd", model, options={"fill": "uniforme"})
    with pytest.raises(CompositionError, match="exact for deterministic guesses"):
        compose("sjd", model, acceptance="delta")
