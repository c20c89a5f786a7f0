"""Shapes, candidates and growth of draft-model trees, on a model whose every answer is known."""

from __future__ import annotations

import pytest
import torch
from markov import Markov

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.drafters.model.draft_tree import DraftTree, DraftTreeOptions
from outrider.drafters.model.rsd_s import StochasticBeam, StochasticBeamOptions
from outrider.drafters.model.spectr import ManyChains, ManyChainsOptions
from outrider.drafters.trees.candidates import coupled_scores, log_chances
from outrider.drafters.trees.levels import kept_part
from outrider.drafters.trees.shape import TreeShape, union

SIZE = 12
LOGITS = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2


def context_of(rows: int, *, temperature: float = 1.0, top_k: int = 0) -> Context:
    states = [RequestState.of(Request([3], SamplingParams(temperature=temperature, top_k=top_k))) for _ in range(rows)]
    noise = Noise(torch.arange(rows) + 5, torch.zeros(rows, dtype=torch.int64))
    return Context(
        [[3 + row % 4] for row in range(rows)], Sampler(states, SIZE, torch.device("cpu")), noise, torch.device("cpu")
    )


def propose(drafter: Drafter, plan: Plan, **options) -> Draft:
    context = context_of(len(plan.max_depth), **options)
    return drafter.propose(drafter.start(context.tokens, {}), context, plan)


def plan_of(depth: int, nodes: int, rows: int = 4) -> Plan:
    return Plan((depth,) * rows, (nodes,) * rows)


MAKERS = {
    "static": lambda draws: DraftTree(Markov(LOGITS), DraftTreeOptions((4, 2, 1, 1)), vocab_size=SIZE, draws=draws),
    "chains": lambda draws: ManyChains(Markov(LOGITS), ManyChainsOptions(3), vocab_size=SIZE, draws=draws),
    "beam": lambda draws: StochasticBeam(Markov(LOGITS), StochasticBeamOptions(3), vocab_size=SIZE),
    "best first": lambda draws: BestFirst(Markov(LOGITS), BestFirstOptions(3, 3), vocab_size=SIZE),
}
CASES = [
    ("static", Draws.DETERMINISTIC),
    ("static", Draws.WITHOUT_REPLACEMENT),
    ("static", Draws.IID),
    ("chains", Draws.IID),
    ("chains", Draws.WITHOUT_REPLACEMENT),
    ("beam", Draws.BEAM),
    ("best first", Draws.DETERMINISTIC),
]


@pytest.mark.parametrize(("name", "draws"), CASES)
def test_trees_are_trees_within_every_rows_plan(name: str, draws: Draws) -> None:
    plan = Plan((4, 1, 0, 2, 4), (20, 20, 5, 1, 6))
    for temperature, top_k in ((1.0, 0), (0.0, 0), (1.0, 2)):
        draft = propose(MAKERS[name](draws), plan, temperature=temperature, top_k=top_k)
        tree = draft.tree
        assert draft.draws is draws
        for row, size in enumerate(tree.sizes):
            parents, tokens = tree.parents[row, :size].tolist(), tree.tokens[row, :size].tolist()
            assert size - 1 <= plan.max_nodes[row]
            assert int(tree.depths[row, :size].max()) <= plan.max_depth[row]
            assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
            depths = tree.depths[row, :size].tolist()
            assert depths == sorted(depths)
            if draws is not Draws.IID:
                assert len(set(zip(parents, tokens))) == size, "two siblings are equal"
            if draft.q is not None and temperature > 0:
                for node in range(1, size):
                    assert draft.q[row, parents[node], tokens[node]] > 0, "a guess its own law cannot draw"


def test_coupled_children_are_the_best_of_the_perturbed_scores() -> None:
    context = context_of(4)
    drafter = DraftTree(Markov(LOGITS), DraftTreeOptions((3, 2)), vocab_size=SIZE)
    tree = drafter.propose(drafter.start(context.tokens, {}), context, plan_of(2, 99)).tree
    for row in range(4):
        for node in range(4):
            law = LOGITS[tree.tokens[row, node]] + context.noise.target_gumbel(tree.depths[:, node : node + 1], SIZE)[row, 0]
            children = [int(tree.tokens[row, n]) for n in range(1, tree.num_nodes) if int(tree.parents[row, n]) == node]
            assert children == law.topk(len(children)).indices.tolist()


def test_without_noise_the_children_are_the_best_of_q() -> None:
    for drafter, options in (
        (DraftTree(Markov(LOGITS), DraftTreeOptions((3,)), vocab_size=SIZE), {"temperature": 0.0}),
        (
            DraftTree(Markov(LOGITS), DraftTreeOptions((3,)), vocab_size=SIZE, draws=Draws.WITHOUT_REPLACEMENT),
            {"temperature": 0.0},
        ),
        (DraftTree(Markov(LOGITS), DraftTreeOptions((3,), perturb=False), vocab_size=SIZE), {}),
    ):
        tree = propose(drafter, plan_of(1, 3), **options).tree
        assert tree.tokens[:, 1:].tolist() == LOGITS[tree.tokens[:, 0]].topk(3).indices.tolist()


def test_a_level_costs_one_pass_over_the_nodes_that_have_children() -> None:
    model = Markov(LOGITS)
    propose(DraftTree(model, DraftTreeOptions((4, 2, 1, 1)), vocab_size=SIZE), plan_of(4, 99))
    assert model.num_scored == [1, 4, 8, 8]
    model.num_scored.clear()
    propose(BestFirst(model, BestFirstOptions(width=3, num_children=5), vocab_size=SIZE), plan_of(4, 99))
    assert model.num_scored == [1, 3, 3, 3]


def test_best_first_keeps_the_likeliest_paths() -> None:
    """Against all paths written out: with everything expanded, the tree is the n paths of largest chance."""
    context, depth, nodes = context_of(3), 2, 9
    drafter = BestFirst(Markov(LOGITS), BestFirstOptions(SIZE, SIZE, tau=0.7), vocab_size=SIZE)
    tree = drafter.propose(drafter.start(context.tokens, {}), context, plan_of(depth, nodes, 3)).tree
    for row in range(3):
        noise = context.noise.target_gumbel(torch.arange(depth).expand(3, -1), SIZE)[row]
        root = (LOGITS[context.roots[row]] + noise[0]).div(0.7).log_softmax(-1)
        second = (LOGITS + noise[1]).div(0.7).log_softmax(-1)
        chances = {(a,): float(root[a]) for a in range(SIZE)}
        chances |= {(a, b): float(root[a] + second[a, b]) for a in range(SIZE) for b in range(SIZE)}
        best = sorted(chances, key=lambda path: -chances[path])[:nodes]
        found = [tuple(int(tree.tokens[row, n]) for n in tree.path(row, node)) for node in range(1, nodes + 1)]
        assert sorted(found) == sorted(best)


def test_ties_never_orphan_a_node() -> None:
    """A draft that is certain gives parent and child the same chance, down every path."""
    certain = torch.full((SIZE, SIZE), -1e4)
    certain[torch.arange(SIZE), torch.arange(SIZE).roll(1)] = 1e4
    for nodes in range(1, 8):
        tree = propose(
            BestFirst(Markov(certain), BestFirstOptions(3, 3), vocab_size=SIZE), plan_of(5, nodes), temperature=0.0
        ).tree
        assert set(tree.sizes) == {nodes + 1}
        depth = int(tree.depths.max())
        assert depth == min(nodes, 5), "the certain path comes first"


def test_chances_are_right_if_the_draft_errs_as_assumed() -> None:
    """Targets whose logits are the draft's plus Gumbel errors of scale tau choose as ``log_chances`` says."""
    tau, count = 0.8, 40000
    context = context_of(1)
    drafter_law = context.sampler.law(LOGITS[3][None, None], TokenTree.chain(torch.tensor([[3]])), context.noise)
    scores = coupled_scores(drafter_law, context, depth=0)
    chances = log_chances(scores, tau)[0, 0].exp()
    errors = -torch.log(-torch.log(torch.rand(count, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)))
    noise = context.noise.target_gumbel(torch.zeros(1, 1, dtype=torch.int64), SIZE)[0, 0]
    choices = (LOGITS[3].log_softmax(-1) + tau * errors + noise).argmax(-1)
    measured = torch.bincount(choices, minlength=SIZE) / count
    assert torch.allclose(measured.double(), chances.double(), atol=0.01)


def test_draws_do_not_depend_on_the_batch() -> None:
    """A row with a small plan beside a row with a large one gets the tree it gets alone."""
    for name, draws in CASES:
        plans = Plan((4, 2, 3, 4), (20, 6, 8, 13))
        together = propose(MAKERS[name](draws), plans).tree
        for row in range(4):
            context = context_of(4)
            one = Context(
                context.tokens[row : row + 1],
                Sampler(context.sampler.rows[:1], SIZE, torch.device("cpu")),
                Noise(context.noise.seeds[row : row + 1], context.noise.positions[row : row + 1]),
                context.device,
            )
            drafter = MAKERS[name](draws)
            alone = drafter.propose(
                drafter.start(one.tokens, {}), one, Plan(plans.max_depth[row : row + 1], plans.max_nodes[row : row + 1])
            ).tree
            assert alone.sizes[0] == together.sizes[row], (name, draws)
            assert alone.tokens[0].tolist() == together.tokens[row, : alone.sizes[0]].tolist()


def test_the_draft_cache_keeps_what_was_fed_of_the_accepted_path() -> None:
    drafter = DraftTree(Markov(LOGITS), DraftTreeOptions((2, 2, 1)), vocab_size=SIZE)
    context = context_of(2)
    state = drafter.start(context.tokens, {})
    draft = drafter.propose(state, context, plan_of(3, 99, 2))
    assert state.cache.lengths == [1, 1]
    paths = [[0, 1, 3, 7], [0, 2]]  # the last node of the first path is a leaf: it was never fed
    drafter.observe(state, Observation(draft, Scores(torch.zeros(2, draft.tree.num_nodes, SIZE)), paths, [3, 1], 0.0, 0.0))
    assert state.cache.lengths == [3, 2]


def test_shapes() -> None:
    binary = TreeShape.of_branching((2, 2))
    assert binary.paths == ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    assert binary.parents == (-1, 0, 0, 1, 1, 2, 2) and binary.widths == (2, 2, 2, 0, 0, 0, 0)
    assert binary.within(3, 9).paths == ((), (0,), (1,), (0, 0))
    assert binary.within(9, 1).paths == ((), (0,), (1,))
    assert binary.within(0, 9).paths == ((),)
    whole, rows = union([binary.within(1, 1), binary.within(2, 2)])
    assert whole.num_nodes == 2 and rows == [[True, True, False], [True, True, True]]
    assert TreeShape.of_branching((1, 1, 1)).is_chain and not binary.is_chain
    for bad in ([(1,)], [(0, 0)], [(0,), (0, 1)], [(-1,)]):
        with pytest.raises(OptionError, match="parent or no elder sibling"):
            TreeShape.of_paths(bad)
    assert DraftTreeOptions("2,2").tree == binary
    for branching in ((), (0,), (2, "x"), "2,x", ""):
        with pytest.raises(OptionError, match="branching"):
            DraftTreeOptions(branching)


def test_kept_part_moves_parents_along() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 4], [9, 5, 6, 7, 8]])
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 3]])
    kept = torch.tensor([[True, False, True, False, True], [True, True, False, True, True]])
    tree, origin = kept_part(tokens, parents, kept)
    assert tree.sizes == (3, 4)
    assert tree.tokens.tolist() == [[9, 2, 4, 0], [9, 5, 7, 8]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, 1, 2]]
    assert origin[0, :3].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: BestFirstOptions(width=0), "width"),
        (lambda: BestFirstOptions(tau=0.0), "tau"),
        (lambda: StochasticBeamOptions(width=0), "width"),
        (lambda: ManyChainsOptions(num_chains=0), "num_chains"),
    ],
)
def test_bad_options_are_refused(make, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        make()
