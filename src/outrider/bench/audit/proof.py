"""The proof of a rule: its output law by enumeration, and its batched form against the scalar one.

The first shows that the scalar rule is exact for the way in which this method draws its guesses. The second shows that the
batched form computes the same, number by number. It uses a temperature and a truncation, so that a law from before the sampler
would be noticed. For a lossy rule the enumeration gives its distance instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.bench.audit.findings import AuditOutcome, Finding, failed, passed
from outrider.bench.audit.toys import Experiment, random_model
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.params import SamplingParams
from outrider.core.random_source import NoiseSource
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Law, Sampler
from outrider.core.tree import TokenTree

EXACT = 1e-12
_CHAINS = ((-1, 0), (-1, 0, 1))
_TREES = ((-1, 0, 0), (-1, 0, 0, 1), (-1, 0, 0, 0))
_VOCAB = 6


@dataclass(frozen=True)
class _Distance:
    mean: float
    worst: float
    count: int


def prove(rule: AcceptanceRule, draws: Draws, *, num_pairs: int = 6) -> Finding:
    """Compare the law of the emitted text with the target's, over random pairs of toy models.

    Guesses are drawn as this method draws them. A rule that claims to be exact is tried with every way of drawing it claims.
    """
    ways = [draws, *(way for way in type(rule).exact_for if way is not draws)] if type(rule).lossless else [draws]
    found = {way: _distance(rule, way, num_pairs) for way in ways}
    worst = max(found, key=lambda way: found[way].worst)
    distance, count = found[worst], sum(one.count for one in found.values())
    name = type(rule).__name__
    data = {"mean_distance": found[draws].mean, "max_distance": distance.worst, "experiments": count}
    figures = f"{count} enumerated experiments with guesses that are {' or '.join(way.value for way in ways)}"
    if distance.worst > EXACT:
        measured = f"total variation over texts of 2 or 3 tokens: {distance.mean:.4f} on average, {distance.worst:.4f} at most"
        where = f"{measured} (guesses {worst.value})"
        return failed("proof", f"{name} does not emit the target's law: {figures}", [where], **data)
    if not type(rule).lossless:
        said = f"{name} happens to be exact on toys of three tokens: {figures}; what it loses elsewhere is measured below"
        return Finding("proof", AuditOutcome.SKIPPED, said, data=data)
    return passed("proof", f"{name} emits the target's law: {figures}, largest distance {distance.worst:.0e}", **data)


def _distance(rule: AcceptanceRule, draws: Draws, num_pairs: int) -> _Distance:
    found = [experiment.distance(rule) for experiment in _experiments(rule, draws, num_pairs)]
    return _Distance(sum(found) / len(found), max(found), len(found))


def _experiments(rule: AcceptanceRule, draws: Draws, num_pairs: int) -> Iterator[Experiment]:
    shapes = [*_CHAINS, *(_TREES if type(rule).shape is Shape.TREE else ())]
    for seed in range(num_pairs):
        p, q = random_model(2 * seed, 3), random_model(2 * seed + 1, 3)
        for parents in shapes:
            yield Experiment(p, q, parents, draws, 2 if max(parents) < 1 else 3)
        yield Experiment(random_model(2 * seed, 2), random_model(2 * seed + 1, 2), _CHAINS[1], draws, 3, rounds=2)
        for keep in ((1, None), (None, 2), (2, 2)):  # greedy target, draft cut, both cut: laws with zeros
            cut = random_model(2 * seed, 3, keep=keep[0]), random_model(2 * seed + 1, 3, keep=keep[1])
            yield Experiment(*cut, _CHAINS[0], draws, 2)
            if type(rule).shape is Shape.TREE:
                yield Experiment(*cut, _TREES[0], draws, 2)


def check_twin(rule: AcceptanceRule, draws: Draws, *, num_batches: int = 80) -> Finding:
    """Compare ``walk`` and ``walk_row`` on the same numbers, for every way of drawing that the rule accepts."""
    name, count, wrong = type(rule).__name__, 0, 0
    ways = [draws, *(way for way in type(rule).exact_for if way is not draws)]
    for seed in range(num_batches):
        is_chain = type(rule).shape is Shape.CHAIN or seed % 2 == 0
        draft, law, noise = _random_batch(seed, ways[(seed // 2) % len(ways)], is_chain=is_chain)
        batched = rule.walk(draft, law, noise).rows
        for row in range(draft.tree.batch_size):
            scalar = rule.walk_row(RowDraft.of(draft, law, row), NoiseSource(noise, row))
            count += 1
            wrong += batched[row] != scalar
    if wrong:
        said = f"{name}: the batched rule differs from the scalar one in {wrong} of {count} rows on the same random numbers"
        return failed("batched rule", said, count=count, wrong=wrong)
    return passed("batched rule", f"{name}: equal to the scalar rule in all of {count} rows", count=count)


def _random_batch(seed: int, draws: Draws, *, is_chain: bool) -> tuple[Draft, Law, Noise]:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [chance.randint(1, 6) for _ in range(4)]
    rows = [_random_row(chance, size, draws, is_chain=is_chain) for size in sizes]
    tree = TokenTree.of_rows(rows)
    noise = Noise(torch.tensor([chance.getrandbits(60) for _ in sizes]), torch.tensor([chance.randrange(99) for _ in sizes]))
    shape = (len(sizes), tree.num_nodes, _VOCAB)
    logits, guessed = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    law = _law_of(2 * logits, tree, noise)
    guessed = (2 * guessed).masked_fill(guessed <= guessed.amin(-1, keepdim=True), -torch.inf)  # a law with a zero
    q = None if draws is Draws.DETERMINISTIC or tree.num_nodes == 1 else torch.softmax(guessed, -1)
    return Draft(tree, draws, q), law, noise


def _random_row(chance: random.Random, size: int, draws: Draws, *, is_chain: bool) -> tuple[list[int], list[int]]:
    parents = list(range(-1, size - 1))
    if not is_chain:
        parents = [-1]
        for node in range(1, size):
            parents.append(chance.randint(max(parents[-1], 0), min(node - 1, max(parents[-1], 0) + 1)))
    tokens = [0]
    for node in range(1, size):
        elders = {tokens[i] for i in range(1, node) if parents[i] == parents[node]}
        free = [token for token in range(_VOCAB) if draws is Draws.IID or token not in elders]
        tokens.append(chance.choice(free))
    return tokens, parents


def _law_of(logits: Tensor, tree: TokenTree, noise: Noise) -> Law:
    params = SamplingParams(temperature=0.6, top_k=5)
    rows = [RequestState.of(Request([0], params)) for _ in range(len(logits))]
    return Sampler(rows, _VOCAB, torch.device("cpu")).law(logits, tree, noise)
