"""The sampler: each parameter against transformers, and every node of a tree against its own unrolled path."""

from __future__ import annotations

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree

VOCAB = 23
CPU = torch.device("cpu")
EVERYTHING = SamplingParams(
    max_tokens=50,
    temperature=0.7,
    top_k=9,
    top_p=0.9,
    min_p=0.02,
    typical_p=0.95,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 1.5, 4: -2.0},
    banned_token_ids=[5],
    min_tokens=6,
)


def state_of(params: SamplingParams, prompt=(1, 2, 3, 2), output=(7, 7, 8), end=frozenset({0})) -> RequestState:
    state = RequestState.of(Request(prompt, params, end))
    state.tokens.extend(output)
    return state


def shaped(params: SamplingParams, logits: torch.Tensor, **context) -> torch.Tensor:
    """The law after the last committed token, from logits [V]."""
    state = state_of(params, **context)
    sampler = Sampler([state], VOCAB, CPU)
    tree = TokenTree.chain(torch.tensor([[state.tokens[-1]]]))
    noise = Noise(torch.tensor([0]), torch.tensor([state.num_output]))
    return sampler.law(logits[None, None], tree, noise).probs[0, 0]


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=0.6), lambda t: t.TemperatureLogitsWarper(0.6)),
        (SamplingParams(temperature=1.0, top_k=4), lambda t: t.TopKLogitsWarper(4)),
        (SamplingParams(temperature=1.0, top_p=0.8), lambda t: t.TopPLogitsWarper(0.8)),
        (SamplingParams(temperature=1.0, min_p=0.1), lambda t: t.MinPLogitsWarper(0.1)),
        (SamplingParams(temperature=1.0, typical_p=0.6), lambda t: t.TypicalLogitsWarper(0.6)),
        (SamplingParams(temperature=1.0, repetition_penalty=1.7), lambda t: t.RepetitionPenaltyLogitsProcessor(1.7)),
    ],
)
def test_each_parameter_equals_transformers(params: SamplingParams, warper) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(0)
    state = state_of(params)
    for _ in range(50):
        logits = torch.randn(VOCAB, generator=generator) * 3
        expected = warper(process)(torch.tensor([state.tokens]), logits[None].clone()).softmax(-1)[0]
        torch.testing.assert_close(shaped(params, logits), expected, atol=1e-6, rtol=1e-5)


def test_openai_penalties_count_output_tokens_only() -> None:
    logits = torch.zeros(VOCAB)
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    law = shaped(params, logits).log()
    base = law[20]
    assert law[7] - base == pytest.approx(-0.5 - 2 * 0.25, abs=1e-5)
    assert law[8] - base == pytest.approx(-0.75, abs=1e-5)
    assert law[1] - base == pytest.approx(0.0, abs=1e-6)  # a prompt token


def test_bias_bans_and_minimum_length() -> None:
    logits = torch.randn(VOCAB)
    law = shaped(SamplingParams(temperature=1.0, logit_bias={4: 100.0}, banned_token_ids=[6]), logits)
    assert law[4] > 0.999 and law[6] == 0
    assert shaped(SamplingParams(temperature=1.0, min_tokens=4), logits)[0] == 0
    assert shaped(SamplingParams(temperature=1.0, min_tokens=3), logits)[0] > 0  # three tokens are out already


def test_temperature_zero_is_a_point_mass_on_the_first_maximum() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 14]] = 2.0
    law = shaped(SamplingParams(), logits)
    assert law[9] == 1 and law.sum() == 1


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(VOCAB)
    assert shaped(SamplingParams(temperature=1.3, top_k=1), logits).argmax() == logits.argmax()


def random_tree(generator: torch.Generator, size: int, root: int) -> tuple[list[int], list[int]]:
    parents = [-1]
    for node in range(1, size):
        low = parents[-1] if node > 1 else 0
        parents.append(int(torch.randint(max(low, 0), node, (1,), generator=generator)))
    tokens = [root, *torch.randint(1, VOCAB, (size - 1,), generator=generator).tolist()]
    return tokens, parents


class EvenOnly:
    """A grammar: token t may be followed by tokens of the other parity; the state is the last parity."""

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return None if token % 2 == state else token % 2

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        return torch.arange(vocab_size) % 2 != state

    def forced(self, state: int) -> tuple[int, ...]:
        return ()


def add_length(tokens, logits):
    """A processor whose effect depends on the whole path."""
    return logits + 0.1 * len(tokens) * (torch.arange(len(logits)) == sum(tokens) % len(logits))


VARIANTS = {
    "everything": EVERYTHING,
    "processor": SamplingParams(temperature=0.9, logits_processors=[add_length]),
    "grammar": SamplingParams(temperature=0.9, top_p=0.9, grammar=EvenOnly()),
    "greedy-penalised": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_has_the_law_of_its_unrolled_path(variant: str) -> None:
    """Scored inside a ragged batch of trees == scored alone, token by token."""
    params = VARIANTS[variant]
    generator = torch.Generator().manual_seed(1)
    states = [state_of(params, output=out) for out in ((7, 8), (9, 4, 4, 3), (2,))]
    for state in states:
        state.grammar_state = state.tokens[-1] % 2
    trees = [random_tree(generator, size, state.tokens[-1]) for size, state in zip((7, 4, 1), states, strict=True)]
    tree = TokenTree.of_rows(trees)
    logits = torch.randn(3, tree.num_nodes, VOCAB, generator=generator) * 2
    sampler = Sampler(states, VOCAB, CPU)
    noise = Noise(torch.tensor([5, 6, 7]), torch.tensor([s.num_output for s in states]))
    law = sampler.law(logits, tree, noise)
    for row, state in enumerate(states):
        for node in range(tree.sizes[row]):
            path = [int(tree.tokens[row, n]) for n in tree.path(row, node)]
            grammar = EvenOnly() if params.grammar else None
            parity: int | None = state.grammar_state  # type: ignore[assignment]
            for token in path:
                parity = grammar.advance(parity, token) if grammar and parity is not None else parity
            if grammar and parity is None:
                continue  # below a forbidden token: can never be reached
            alone = state_of(params, output=(*state.output_ids, *path))
            alone.grammar_state = parity
            chain = TokenTree.chain(torch.tensor([[alone.tokens[-1]]]))
            single_noise = Noise(noise.seeds[row : row + 1], torch.tensor([alone.num_output]))
            single = Sampler([alone], VOCAB, CPU).law(logits[row : row + 1, node : node + 1], chain, single_noise)
            torch.testing.assert_close(law.probs[row, node], single.probs[0, 0], atol=1e-6, rtol=1e-5)
            assert law.choices[row, node] == single.choices[0, 0]


def test_a_level_of_a_tree_can_be_shaped_on_its_own() -> None:
    """A drafter shapes the newest nodes only; the result is that of the whole tree."""
    state = state_of(EVERYTHING)
    tree = TokenTree.of_rows([([8, 1, 2, 3, 4], [-1, 0, 0, 1, 2])])
    logits = torch.randn(1, 5, VOCAB)
    noise = Noise(torch.tensor([3]), torch.tensor([state.num_output]))
    sampler = Sampler([state], VOCAB, CPU)
    whole, part = sampler.law(logits, tree, noise), sampler.law(logits[:, 3:], tree, noise, start=3)
    torch.testing.assert_close(whole.probs[:, 3:], part.probs)
    assert torch.equal(whole.choices[:, 3:], part.choices)


def test_a_row_does_not_depend_on_its_batch() -> None:
    mixed = [SamplingParams(), EVERYTHING, SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=0.5)]
    states = [state_of(p) for p in mixed]
    logits = torch.randn(len(mixed), 1, VOCAB)
    tree = TokenTree.chain(torch.tensor([[8]] * len(mixed)))
    noise = Noise(torch.arange(len(mixed)), torch.full((len(mixed),), 3))
    together = Sampler(states, VOCAB, CPU).law(logits, tree, noise)
    for row, params in enumerate(mixed):
        torch.testing.assert_close(together.probs[row, 0], shaped(params, logits[row, 0]))


def test_gumbel_choices_follow_the_law() -> None:
    """Over many seeds the chosen token has the law's frequencies."""
    params = SamplingParams(temperature=0.9, top_k=5)
    count = 20_000
    states = [state_of(params)] * count
    logits = torch.randn(1, 1, VOCAB).expand(count, 1, VOCAB)
    tree = TokenTree.chain(torch.full((count, 1), 8))
    law = Sampler(states, VOCAB, CPU).law(logits, tree, Noise(torch.arange(count), torch.full((count,), 3)))
    frequencies = torch.bincount(law.choices[:, 0], minlength=VOCAB) / count
    assert (frequencies - law.probs[0, 0]).abs().max() < 0.015


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_bad_values_are_refused(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        SamplingParams(**options)


def test_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        SamplingParams.of(temprature=0.5)


def test_a_token_at_the_cut_falls_where_transformers_puts_it() -> None:
    """The four likeliest tokens add up to p but for rounding: the fifth is kept or dropped by the order of additions."""
    process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(1)
    for p in (0.2, 0.4, 0.6, 0.8):
        for _ in range(20):
            head = torch.rand(4, generator=generator) + 0.5
            tail = torch.rand(VOCAB - 4, generator=generator) * 0.05
            logits = torch.cat((p * head / head.sum(), (1 - p) * tail / tail.sum())).log()
            expected = process.TopPLogitsWarper(p)(torch.tensor([[0]]), logits[None].clone()).softmax(-1)[0]
            torch.testing.assert_close(shaped(SamplingParams(temperature=1.0, top_p=p), logits), expected, atol=1e-6, rtol=1e-5)
