"""How much of greedy decoding's speed is left when sampling? Coupled trees against the other lossless rules.

Two tables on one pair of models (the bundled one by default), at one temperature, with greedy decoding for scale:

 1. acceptance of one tree level with k = 1, 2, 4, 8 siblings, at positions of the target's own text;
 2. tokens per target pass of trees of at most --nodes guesses. Every static tree is the one Sequoia's dynamic programme finds
    for that rule's own acceptance by rank, from table 1.

The coupled runs are also compared, token for token, with plain sampling of the same seeds. The last line of stdout is one
JSON document.

    python recipes/coupled_trees.py
    python recipes/coupled_trees.py --model DIR --draft DIR --temperature 0.7 --nodes 64
    python recipes/coupled_trees.py --mix 0.5            # what a better draft would give
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.acceptance import Coupled, Delta, KSeq, Recursive, Traversal
from outrider.core.draft import Draft, Draws, Resume
from outrider.core.interfaces import AcceptanceRule, Cache, Drafter, Target
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.drafters.model.draft_tree import DraftTree, DraftTreeOptions
from outrider.drafters.model.rsd_s import StochasticBeam, StochasticBeamOptions
from outrider.drafters.model.sequoia import best_tree
from outrider.drafters.model.spectr import ManyChains, ManyChainsOptions
from outrider.policies.fixed import Fixed, FixedOptions

SIBLINGS = (1, 2, 4, 8)
PROMPTS = (
    "Once upon a time, there was a little fox who",
    "Tom and Lily went to the park. They saw a big",
    "One day, a girl named Mia found a red ball in the garden. She",
    "The old man had a small boat. Every morning he",
    "Sara liked to bake cakes with her mom. One morning",
    "There was a tiny bird in the tall tree. It",
    "Ben was sad because his toy car was broken. He",
    "It was a cold day and the snow was white. Anna",
)


@final
class PairCache(Cache):
    """The caches of two models that read the same tokens."""

    def __init__(self, first: Cache, second: Cache) -> None:
        self.first, self.second = first, second

    @property
    def lengths(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.first.lengths

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.first.reserve(num_nodes, start=start)
        self.second.reserve(num_nodes, start=start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.first.commit(paths)
        self.second.commit(paths)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.first.truncate(lengths)
        self.second.truncate(lengths)

    def fork(self, rows: Sequence[int]) -> PairCache:
        return PairCache(self.first.fork(rows), self.second.fork(rows))

    def join(self, other: Cache) -> PairCache:
        assert isinstance(other, PairCache)
        return PairCache(self.first.join(other.first), self.second.join(other.second))


@final
class Mixed(Target):
    """A draft of any quality: ``share`` of the target's logits and the rest of the draft's. Only to measure with."""

    def __init__(self, draft: Target, target: Target, share: float) -> None:
        self.draft, self.target, self.share = draft, target, share
        self.vocab_size, self.max_len, self.num_layers = target.vocab_size, draft.max_len, draft.num_layers
        self.device, self.dtype = draft.device, draft.dtype

    def new_cache(self, batch_size: int) -> PairCache:
        return PairCache(self.draft.new_cache(batch_size), self.target.new_cache(batch_size))

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        assert isinstance(cache, PairCache) and not taps
        self.target.prefill(rows, cache.second)
        return self.draft.prefill(rows, cache.first)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert isinstance(cache, PairCache) and not taps and resume is None
        pair = ((self.draft, cache.first), (self.target, cache.second))
        draft, target = (model.score(tree, part, start=start).logits.log_softmax(-1) for model, part in pair)
        return Scores((1 - self.share) * draft + self.share * target)

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass
class Level:
    """Cumulative acceptance of one level by number of siblings, and the rates of single ranks."""

    by_rank: tuple[float, ...]

    def at(self, count: int) -> float:
        return sum(self.by_rank[:count])


@dataclass
class Laws:
    """Raw logits of target and draft at positions of the target's own text, and noise for each."""

    target: Tensor
    draft: Tensor
    temperature: float

    def __post_init__(self) -> None:
        self.p, self.q = ((logits / (self.temperature or 1)).log_softmax(-1) for logits in (self.target, self.draft))
        seeds = torch.arange(len(self.p))
        self.noise = Noise(seeds, torch.zeros_like(seeds))


def laws_of(llm: LLM, draft: Target, texts: list[tuple[list[int], list[int]]], *, temperature: float) -> Laws:
    """One pass of each model over every text; its prompt is not counted."""
    found: list[list[Tensor]] = [[], []]
    for prompt, text in texts:
        tree = TokenTree.chain(torch.tensor([[*prompt, *text]]))
        for model, logits in zip((llm.target, draft), found, strict=True):
            logits.append(model.score(tree, model.new_cache(1)).logits[0, len(prompt) - 1 : -1].float())
    return Laws(torch.cat(found[0]), torch.cat(found[1]), temperature)


def by_rank(choices: Tensor, order: Tensor) -> Level:
    """How often the target's choice is the first, second ... of the candidates [M, K]."""
    return Level(tuple((order == choices[:, None]).float().mean(0).tolist()))


def coupled_level(laws: Laws, greedy: bool) -> Level:
    gumbel = 0.0 if greedy else laws.noise.target_gumbel(torch.zeros(len(laws.p), 1, dtype=torch.int64), laws.p.shape[-1])[:, 0]
    return by_rank((laws.p + gumbel).argmax(-1), (laws.q + gumbel).topk(max(SIBLINGS), -1).indices)


def delta_level(laws: Laws) -> Level:
    """Exact: what the target gives the draft's best tokens."""
    best = laws.q.topk(max(SIBLINGS), -1).indices
    return Level(tuple(laws.p.exp().gather(1, best).mean(0).tolist()))


def recursive_level(laws: Laws, chunk: int = 64) -> Level:
    """The rule itself on trees of one level, siblings drawn without replacement."""
    taken = torch.zeros(max(SIBLINGS) + 1)
    lanes = torch.zeros(len(laws.p), 1, dtype=torch.int64)
    guesses = (laws.q + laws.noise.gumbel(Purpose.DRAFT, lanes, laws.q.shape[-1])[:, 0]).topk(max(SIBLINGS), -1).indices
    for begin in range(0, len(laws.p), chunk):
        part = slice(begin, begin + chunk)
        tokens = torch.cat([torch.zeros_like(guesses[part, :1]), guesses[part]], 1)
        parents = torch.tensor([-1] + [0] * max(SIBLINGS)).expand_as(tokens)
        tree = TokenTree(tokens, parents, (tokens.shape[1],) * len(tokens))
        noise = Noise(laws.noise.seeds[part], laws.noise.positions[part])
        rows = [RequestState.of(Request([0], SamplingParams(temperature=1.0))) for _ in range(len(tokens))]
        sampler = Sampler(rows, laws.p.shape[-1], torch.device("cpu"))
        p, q = (logits[part, None].expand(-1, tokens.shape[1], -1) for logits in (laws.p, laws.q))
        verdict = Recursive().walk(Draft(tree, Draws.WITHOUT_REPLACEMENT, q.exp()), sampler.law(p, tree, noise), noise)
        ends = torch.where(verdict.num_accepted > 0, verdict.path[:, 0], 0)
        taken += torch.bincount(ends, minlength=len(taken))
    return Level(tuple((taken[1:] / len(laws.p)).tolist()))


@dataclass
class Run:
    """One drafter and rule on all prompts."""

    name: str
    drafter: Drafter
    rule: AcceptanceRule
    temperature: float
    tokens: int = 0
    passes: int = 0
    guesses: int = 0
    seconds: float = 0.0
    same: bool | None = None

    @property
    def per_pass(self) -> float:
        return self.tokens / self.passes

    def measure(self, llm: LLM, args: argparse.Namespace, expected: list[list[int]]) -> None:
        began = time.perf_counter()
        policy = Fixed(FixedOptions(num_draft_tokens=args.depth, num_tree_nodes=args.nodes))
        outputs = llm.generate(
            prompts_of(args), params_of(args, self.temperature), method=Method(self.drafter, self.rule, policy)
        )
        for output in outputs:
            self.tokens += output.stats.num_tokens
            self.passes += output.stats.num_passes
            self.guesses += output.stats.num_drafted
        self.seconds = time.perf_counter() - began
        if isinstance(self.rule, Coupled):
            self.same = [output.token_ids for output in outputs] == expected


def prompts_of(args: argparse.Namespace) -> list[str]:
    return [prompt for _ in range(args.repeat) for prompt in PROMPTS]


def params_of(args: argparse.Namespace, temperature: float) -> list[SamplingParams]:
    count = args.repeat * len(PROMPTS)
    return [SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=s, ignore_eos=True) for s in range(count)]


def runs_of(llm: LLM, draft: Target, args: argparse.Namespace, *, levels: dict[str, Level]) -> list[Run]:
    vocab_size, hot = llm.target.vocab_size, args.temperature

    def static(level: str, draws: Draws, *, perturb: bool = True) -> DraftTree:
        shape = best_tree(levels[level].by_rank, args.nodes, max_depth=args.depth)
        return DraftTree(draft, DraftTreeOptions(rank_paths=shape.paths, perturb=perturb), vocab_size=vocab_size, draws=draws)

    def best_first(*, perturb: bool = True) -> BestFirst:
        options = BestFirstOptions(width=args.width, num_children=8, tau=args.tau, perturb=perturb)
        return BestFirst(draft, options, vocab_size=vocab_size)

    without = static("recursive", Draws.WITHOUT_REPLACEMENT)
    width = max(1, args.nodes // args.depth)
    beam = StochasticBeam(draft, StochasticBeamOptions(width), vocab_size=vocab_size)
    chains = ManyChains(draft, ManyChainsOptions(width), vocab_size=vocab_size)
    chosen = Draws.DETERMINISTIC
    return [
        Run("coupled, static tree", static("coupled", chosen), Coupled(), hot),
        Run("coupled, best first", best_first(), Coupled(), hot),
        Run("recursive, static tree", without, Recursive(), hot),
        Run("recursive, stochastic beam", beam, Recursive(), hot),
        Run("traversal, static tree", without, Traversal(), hot),
        Run("k-SEQ, chains", chains, KSeq(), hot),
        Run("delta, top-k of q, static tree", static("delta", chosen, perturb=False), Delta(), hot),
        Run("delta, top-k of q, best first", best_first(perturb=False), Delta(), hot),
        Run("greedy, static tree", static("greedy", chosen), Coupled(), 0.0),
        Run("greedy, best first", best_first(), Coupled(), 0.0),
    ]


def print_levels(levels: dict[str, Level]) -> None:
    print(f"{'acceptance of one level':<34}" + "".join(f"{f'k={count}':>8}" for count in SIBLINGS))
    for name, level in levels.items():
        print(f"{name:<34}" + "".join(f"{level.at(count):>8.3f}" for count in SIBLINGS))


def print_runs(runs: list[Run], nodes: int) -> None:
    print(f"\n{f'trees of at most {nodes} guesses':<34}{'tokens/pass':>12}{'guesses':>9}{'same text':>11}{'seconds':>9}")
    for run in runs:
        same = "" if run.same is None else str(run.same)
        print(f"{run.name:<34}{run.per_pass:>12.2f}{run.guesses / run.passes:>9.1f}{same:>11}{run.seconds:>9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=32, help="most guesses of a tree")
    parser.add_argument("--depth", type=int, default=8, help="most guesses along a path")
    parser.add_argument("--width", type=int, default=4, help="nodes expanded per level of a best-first tree")
    parser.add_argument("--tau", type=float, default=BestFirstOptions().tau)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--repeat", type=int, default=2, help="times every prompt is used, each with a seed of its own")
    parser.add_argument("--mix", type=float, default=0.0, help="share of the target's logits in the draft's: a better draft")
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(args.model, draft=args.draft, method="draft-model", dtype="float32")
    assert llm.draft is not None
    draft = Mixed(llm.draft, llm.target, args.mix) if args.mix else llm.draft
    plain = llm.compose("plain")
    prompts, expected, laws = prompts_of(args), {}, {}
    for temperature in (args.temperature, 0.0):
        outputs = llm.generate(prompts, params_of(args, temperature), method=plain)
        expected[temperature] = [output.token_ids for output in outputs]
        texts = [(output.prompt_token_ids, output.token_ids) for output in outputs]
        laws[temperature] = laws_of(llm, draft, texts, temperature=temperature)
    sampled = laws[args.temperature]
    levels = {
        "coupled": coupled_level(sampled, greedy=False),
        "recursive": recursive_level(sampled),
        "delta": delta_level(sampled),
        "greedy": coupled_level(laws[0.0], greedy=True),
    }
    print_levels(levels)
    runs = runs_of(llm, draft, args, levels=levels)
    for run in runs:
        run.measure(llm, args, expected[run.temperature])
    print_runs(runs, args.nodes)
    result = {
        "settings": vars(args),
        "positions": len(sampled.p),
        "level": {name: {str(count): round(level.at(count), 4) for count in SIBLINGS} for name, level in levels.items()},
        "tokens_per_pass": {run.name: round(run.per_pass, 3) for run in runs},
        "same_text": {run.name: run.same for run in runs if run.same is not None},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
