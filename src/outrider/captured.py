"""Which methods run as captured rounds on a GPU, and the choice between them and the engine.

A method whose target, drafter, rule and policy all have a twin that stays on the device takes whole rounds as one graph
(``engine/overlap.py``). Everything else, and every request that asks for more than a temperature, takes the engine, whose
passes are graphs too. The text is the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

from outrider.acceptance import Coupled
from outrider.core.device_round import DeviceDrafter
from outrider.core.draft import Draws
from outrider.core.interfaces import Drafter, Target
from outrider.core.method import Method
from outrider.core.report import Progress
from outrider.core.request import Request
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.drafters.model.draft_model import DraftModel
from outrider.drafters.model.draft_tree import DraftTree
from outrider.drafters.plain import NullDrafter
from outrider.drafters.trees.shape import TreeShape
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.policies.adaptive import Adaptive
from outrider.policies.fixed import Fixed
from outrider.policies.heuristic import Heuristic

if TYPE_CHECKING:
    from outrider.engine.graphs import RoundGraphs
    from outrider.models.gpu.best_first import Search
    from outrider.models.gpu.decoder import FastDecoder


@final
class Rounds:
    """Runs requests on one target, the fastest way there is for a method."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._graphs: WeakKeyDictionary[Method, RoundGraphs | None] = WeakKeyDictionary()

    def run(
        self, method: Method, requests: Sequence[Request], *, max_batch_size: int, traced: bool = False
    ) -> Iterator[Progress]:
        """As ``engine.generate.run``. With ``traced`` every round reports its tree, which captured rounds cannot: the host runs
        them then."""
        engine = Engine(self._target, method)
        graphs = self._graphs_of(method) if not traced and self._target.device.type == "cuda" else None
        if graphs is not None:
            from outrider.engine.overlap import can_overlap, run_overlapped

            for request in requests:
                engine.check(request)
            if can_overlap(graphs, requests):
                yield from run_overlapped(graphs, requests, max_batch_size=max_batch_size)
                return
        yield from run(engine, requests, max_batch_size=max_batch_size)

    def prepare(self, method: Method, *, batch_size: int = 1, num_tokens: int = 1024) -> Iterator[tuple[int, int]]:
        """Compile and capture what the first ``batch_size`` requests of up to ``num_tokens`` tokens would wait for; yields how
        many rounds are ready, and of how many. Nothing to do where rounds are not captured."""
        graphs = self._graphs_of(method) if self._target.device.type == "cuda" else None
        if graphs is None or graphs.is_busy:
            return
        from outrider.engine.overlap import num_slots

        guesses = [graphs.most_guesses] if isinstance(method.policy, Fixed) else [*range(graphs.most_guesses + 1)]
        for count, _ in enumerate(graphs.prepare(num_slots(batch_size), num_tokens, guesses=guesses), 1):
            yield count, len(guesses)

    def _graphs_of(self, method: Method) -> RoundGraphs | None:
        if method not in self._graphs:
            self._graphs[method] = captured(method, self._target)
        return self._graphs[method]


def captured(method: Method, target: Target) -> RoundGraphs | None:
    """The method as captured rounds; None where a part of it has no twin on the device."""
    policy = method.policy
    if not isinstance(method.rule, Coupled) or not isinstance(policy, Fixed | Adaptive | Heuristic):
        return None
    from outrider.engine.graphs import RoundGraphs
    from outrider.models.gpu.decoder import FastDecoder

    if not isinstance(target, FastDecoder):
        return None
    if isinstance(method.drafter, NullDrafter):
        return RoundGraphs(target, None, policy, most_guesses=0)
    drafter = _twin(method.drafter, policy, target)
    most = policy.options.num_draft_tokens
    return None if drafter is None else RoundGraphs(target, drafter, policy, most_guesses=most)


def _twin(drafter: Drafter, policy: Fixed | Adaptive | Heuristic, target: FastDecoder) -> DeviceDrafter | None:
    from outrider.models.gpu.branches import DeviceTree
    from outrider.models.gpu.chain import DeviceChain
    from outrider.models.gpu.decoder import FastDecoder
    from outrider.models.gpu.draft_search import DeviceBestFirst
    from outrider.models.gpu.lookup import DeviceLookup

    if isinstance(drafter, PromptLookup):
        return DeviceLookup(min_ngram=drafter.options.min_ngram, max_ngram=drafter.options.max_ngram)
    if isinstance(drafter, Eagle):
        return _eagle(drafter, policy, target) if isinstance(policy, Fixed) else None
    if not isinstance(drafter, DraftModel | DraftTree | BestFirst) or drafter.draws is not Draws.DETERMINISTIC:
        return None
    model = drafter.model
    if not isinstance(model, FastDecoder):
        return None
    if isinstance(drafter, DraftModel):
        return DeviceChain(model, vocab_size=drafter.vocab_size)
    if not isinstance(policy, Fixed):  # a captured tree has one size
        return None
    if isinstance(drafter, BestFirst):
        search = _search(drafter.options, policy)
        fits = drafter.options.perturb and search.fits
        return DeviceBestFirst(model, vocab_size=drafter.vocab_size, search=search) if fits else None
    if not drafter.drawing.perturb:
        return None
    tree = _cut(drafter.tree, policy)
    return DeviceTree(model, vocab_size=drafter.vocab_size, parents=tree.parents, ranks=_ranks(tree))


def _eagle(drafter: Eagle, policy: Fixed, target: FastDecoder) -> DeviceDrafter | None:
    from outrider.models.gpu.eagle import BestFirstEagle, StaticEagle
    from outrider.models.gpu.head_layer import FastHead

    if not FastHead.can_run(drafter.head):
        return None
    if drafter.static_tree is not None:
        tree = _cut(drafter.static_tree, policy)
        return StaticEagle(drafter.head, target, parents=tree.parents, ranks=_ranks(tree))
    search = None if drafter.search is None else _search(drafter.search, policy)
    return None if search is None or not search.fits else BestFirstEagle(drafter.head, target, search=search)


def _search(options: BestFirstOptions, policy: Fixed) -> Search:
    from outrider.models.gpu.best_first import Search

    depth, nodes = policy.options.num_draft_tokens, policy.options.num_tree_nodes or policy.options.num_draft_tokens
    search = Search(depth, nodes + 1, options.width, options.num_children, options.tau)
    return replace(search, num_nodes=min(search.num_nodes, search.pool_size))


def _cut(tree: TreeShape, policy: Fixed) -> TreeShape:
    options = policy.options
    return tree.within(options.num_tree_nodes or options.num_draft_tokens, options.num_draft_tokens)


def _ranks(tree: TreeShape) -> list[int]:
    return [path[-1] if path else 0 for path in tree.paths]
