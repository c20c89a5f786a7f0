"""THE TABLE: every method by name, as one choice per stage.

A row names a drafter; the acceptance rule and the policy have their own short tables, so any row can be run with any rule
that is exact for it. Adding a method is one file under ``drafters/`` (or ``acceptance/``, ``policies/``), one row here and
one page under ``docs/methods/``; the contract tests run over these tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from outrider.acceptance import Block, Coupled, Delta, KSeq, Recursive, Rejection, Traversal
from outrider.acceptance.divergence import Divergence, DivergenceOptions
from outrider.acceptance.lenient import Lenient, LenientOptions
from outrider.acceptance.threshold import ThresholdRule, ThresholdRuleOptions
from outrider.acceptance.top_k_rule import TopK, TopKOptions
from outrider.acceptance.typical import Typical, TypicalOptions
from outrider.core.catalog import Catalog
from outrider.core.choice import Choice, Tables
from outrider.core.draft import Draws
from outrider.core.entry_points import each_entry_point
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Drafter, Target
from outrider.core.method import Method, agree_on_draws
from outrider.core.table import MethodRow, Parts, PolicyRow, RuleRow, fill
from outrider.core.translation import Translation
from outrider.drafters.best_first import BestFirst, BestFirstOptions
from outrider.drafters.cascade import Cascade, CascadeOptions
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.draft_tree import DraftTree, DraftTreeOptions
from outrider.drafters.draft_verify import DraftVerify, DraftVerifyOptions
from outrider.drafters.dynamic_exit import DynamicExit, DynamicExitOptions
from outrider.drafters.early_exit import EarlyExit, EarlyExitOptions, EarlyExitTree
from outrider.drafters.fused import Fused, HybridOptions
from outrider.drafters.head_rows import HEAD_ROWS
from outrider.drafters.jacobi import Jacobi, JacobiOptions
from outrider.drafters.kangaroo import Kangaroo, KangarooOptions, build_kangaroo
from outrider.drafters.lookahead import Lookahead, LookaheadOptions
from outrider.drafters.many_chains import ManyChains, ManyChainsOptions
from outrider.drafters.multi_draft import MultiDraft
from outrider.drafters.ngram import PromptLookup, PromptLookupOptions
from outrider.drafters.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from outrider.drafters.null import NullDrafter
from outrider.drafters.rasd import Rasd, RasdOptions
from outrider.drafters.recycling import TokenRecycling, TokenRecyclingOptions
from outrider.drafters.reencode import Reencode
from outrider.drafters.reference import ReferenceLookup, ReferenceOptions
from outrider.drafters.rest import RestDrafter, RestOptions
from outrider.drafters.self_chain import layered
from outrider.drafters.sequoia import SequoiaOptions
from outrider.drafters.stochastic_beam import StochasticBeam, StochasticBeamOptions
from outrider.drafters.successors import SuccessorTable
from outrider.drafters.suffix import SuffixDecoding, SuffixOptions
from outrider.drafters.swift import Swift, SwiftOptions, build_swift
from outrider.drafters.tli import SharedTokens
from outrider.policies.adaptive import Adaptive, AdaptiveOptions
from outrider.policies.bandit import Bandit, BanditOptions
from outrider.policies.confidence import Confidence, ConfidenceOptions
from outrider.policies.entropy import Entropy, EntropyOptions
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.policies.heuristic import Heuristic, HeuristicOptions
from outrider.policies.optimal import Optimal, OptimalOptions
from outrider.policies.threshold import Threshold, ThresholdOptions


def _build_draft_model(parts: Parts) -> Drafter:
    return DraftModel(_draft_of(parts), vocab_size=parts.target.vocab_size, draws=parts.draws)


def _draft_of(parts: Parts) -> Target:
    assert parts.draft is not None, "compose() checks needs_draft"
    return parts.draft


def _build_draft_tree(parts: Parts) -> Drafter:
    return DraftTree(_draft_of(parts), parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


def _build_sequoia(parts: Parts) -> Drafter:
    shape = DraftTreeOptions(rank_paths=tuple(path for path in parts.options.tree.paths if path))
    return DraftTree(_draft_of(parts), shape, vocab_size=parts.target.vocab_size, draws=parts.draws)


def _build_best_first(parts: Parts) -> Drafter:
    return BestFirst(_draft_of(parts), parts.options, vocab_size=parts.target.vocab_size)


def _build_stochastic_beam(parts: Parts) -> Drafter:
    return StochasticBeam(_draft_of(parts), parts.options, vocab_size=parts.target.vocab_size)


def _build_many_chains(parts: Parts) -> Drafter:
    return ManyChains(_draft_of(parts), parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


def _part(parts: Parts, name: str, *, skip_drafts: int = 0) -> Drafter:
    assert parts.part is not None, "compose() hands the builder on"
    return parts.part(name, skip_drafts=skip_drafts)


def _build_hybrid(parts: Parts) -> Drafter:
    options = parts.options
    return Fused([_part(parts, name) for name in options.names], options.fused)


def _build_rasd(parts: Parts) -> Drafter:
    retriever = _part(parts, parts.options.retriever)
    return Rasd(_draft_of(parts), retriever, parts.options, vocab_size=parts.target.vocab_size)


def _build_cascade(parts: Parts) -> Drafter:
    inner = _part(parts, parts.options.inner, skip_drafts=1)
    return Cascade(_draft_of(parts), inner, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


def _build_multi_draft(parts: Parts) -> Drafter:
    return MultiDraft(parts.drafts, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


def _translation_of(parts: Parts) -> Translation:
    assert parts.translation is not None, "compose() checks foreign rows"
    return parts.translation


def _build_tli(parts: Parts) -> Drafter:
    translation, size = _translation_of(parts), parts.target.vocab_size
    return SharedTokens(_draft_of(parts), translation, vocab_size=size, draws=parts.draws)


def _build_reencode(parts: Parts) -> Drafter:
    return Reencode(_draft_of(parts), _translation_of(parts), vocab_size=parts.target.vocab_size)


def _build_suffix(parts: Parts) -> Drafter:
    return SuffixDecoding(parts.options, memory=parts.options.new_memory(parts.target.vocab_size))


def _build_ngram_cache(parts: Parts) -> Drafter:
    return NgramCacheDrafter(parts.options, memory=parts.options.new_memory(parts.target.vocab_size))


def _build_rest(parts: Parts) -> Drafter:
    return RestDrafter(parts.options, datastore=parts.options.open_datastore(), vocab_size=parts.target.vocab_size)


def _build_recycling(parts: Parts) -> Drafter:
    target = parts.target
    table = SuccessorTable(target.vocab_size, parts.options.num_successors, device=target.device)
    return TokenRecycling(target, table, parts.options)


def _build_early_exit(parts: Parts) -> Drafter:
    target, options = layered(parts.target, "early-exit"), parts.options
    return (EarlyExit if options.branching is None else EarlyExitTree)(target, options, draws=parts.draws)


METHODS: Catalog[MethodRow] = Catalog(
    "method",
    {
        "plain": MethodRow(
            summary="no guesses: one target pass per token",
            paper="-",
            drafter=NullDrafter,
            build=lambda parts: NullDrafter(draws=parts.draws),
            policy="fixed",
        ),
        "draft-model": MethodRow(
            summary="a small model of the same vocabulary guesses a chain",
            paper="Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318)",
            drafter=DraftModel,
            build=_build_draft_model,
            needs_draft=True,
        ),
        "draft-tree": MethodRow(
            summary="a draft model guesses a tree of fixed branching",
            paper="Miao et al. 2023, SpecInfer (arXiv 2305.09781); Jeon et al. 2024, RSD-C (arXiv 2402.14160)",
            drafter=DraftTree,
            build=_build_draft_tree,
            options=DraftTreeOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "best-first": MethodRow(
            summary="a draft model grows its most promising branches",
            paper="Li et al. 2024, EAGLE-2's trees (arXiv 2406.16858)",
            drafter=BestFirst,
            build=_build_best_first,
            options=BestFirstOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "sequoia": MethodRow(
            summary="a draft model guesses the tree that measured acceptance makes best",
            paper="Chen et al. 2024, Sequoia (arXiv 2402.12374)",
            drafter=DraftTree,
            build=_build_sequoia,
            options=SequoiaOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "rsd-s": MethodRow(
            summary="a draft model's stochastic beam, sampled without replacement along whole sequences",
            paper="Jeon et al. 2024, RSD-S (arXiv 2402.14160)",
            drafter=StochasticBeam,
            build=_build_stochastic_beam,
            options=StochasticBeamOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "spectr": MethodRow(
            summary="several independent chains from a draft model",
            paper="Sun et al. 2023, SpecTr (arXiv 2310.15141)",
            drafter=ManyChains,
            build=_build_many_chains,
            options=ManyChainsOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "multi-draft": MethodRow(
            summary="several draft models take turns in one tree",
            paper="Miao et al. 2023, SpecInfer (arXiv 2305.09781)",
            drafter=MultiDraft,
            build=_build_multi_draft,
            options=DraftTreeOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
            needs_draft=True,
        ),
        "prompt-lookup": MethodRow(
            summary="copies what followed the same words earlier in the text",
            paper="Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding)",
            drafter=PromptLookup,
            build=lambda parts: PromptLookup(parts.options),
            options=PromptLookupOptions,
            defaults={"num_draft_tokens": 8},
        ),
        "suffix": MethodRow(
            summary="copies from the request's own text and all earlier outputs, as far as the match deserves",
            paper="Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975)",
            drafter=SuffixDecoding,
            build=_build_suffix,
            options=SuffixOptions,
            defaults={"num_draft_tokens": 16},
        ),
        "ngram-cache": MethodRow(
            summary="what usually followed the last few tokens, learned across requests",
            paper="Ou et al. 2024, ANPD (arXiv 2404.08698)",
            drafter=NgramCacheDrafter,
            build=_build_ngram_cache,
            options=NgramCacheOptions,
            defaults={"num_draft_tokens": 8},
        ),
        "reference": MethodRow(
            summary="copies from documents given with the request, and from the text itself",
            paper="Yang et al. 2023, LLMA (arXiv 2304.04487)",
            drafter=ReferenceLookup,
            build=lambda parts: ReferenceLookup(parts.options, vocab_size=parts.target.vocab_size),
            options=ReferenceOptions,
            defaults={"num_draft_tokens": 8},
            texts=("references",),
        ),
        "rest": MethodRow(
            summary="a tree of what most often followed in a corpus on disk",
            paper="He et al. 2023, REST (arXiv 2311.08252)",
            drafter=RestDrafter,
            build=_build_rest,
            options=RestOptions,
            defaults={"num_draft_tokens": 10, "num_tree_nodes": 32},
            needs=("datastore",),
        ),
        "token-recycling": MethodRow(
            summary="a tree of what the target last said after each token",
            paper="Luo et al. 2024 (arXiv 2408.08696)",
            drafter=TokenRecycling,
            build=_build_recycling,
            options=TokenRecyclingOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 60},
        ),
        "jacobi": MethodRow(
            summary="the target's own corrections of its last guesses",
            paper="Santilli et al. 2023 (arXiv 2305.10427)",
            drafter=Jacobi,
            build=lambda parts: Jacobi(parts.options),
            options=JacobiOptions,
            defaults={"num_draft_tokens": 8},
        ),
        "lookahead": MethodRow(
            summary="n-grams from a window of Jacobi iterations that runs ahead of the text",
            paper="Fu et al. 2024, Lookahead Decoding (arXiv 2402.02057)",
            drafter=Lookahead,
            build=lambda parts: Lookahead(parts.options),
            options=LookaheadOptions,
            defaults={"num_draft_tokens": 20, "num_tree_nodes": 128},
        ),
        "early-exit": MethodRow(
            summary="the target's first layers guess, and its other layers go on from there",
            paper="Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710)",
            drafter=EarlyExit,
            build=_build_early_exit,
            options=EarlyExitOptions,
        ),
        "kangaroo": MethodRow(
            summary="early exit, with a trained adapter where there is one, that stops drafting when unsure",
            paper="Liu et al. 2024, Kangaroo (arXiv 2404.18911)",
            drafter=Kangaroo,
            build=build_kangaroo,
            options=KangarooOptions,
            defaults={"num_draft_tokens": 6},
        ),
        "draft-verify": MethodRow(
            summary="the target without some sublayers guesses, as long as it is sure",
            paper="Zhang et al. 2023, Draft & Verify (arXiv 2309.08168)",
            drafter=DraftVerify,
            build=lambda parts: DraftVerify(layered(parts.target, "draft-verify"), parts.options, draws=parts.draws),
            options=DraftVerifyOptions,
            defaults={"num_draft_tokens": 8},
        ),
        "swift": MethodRow(
            summary="the same, and which sublayers to skip is found while generating",
            paper="Xia et al. 2024, SWIFT (arXiv 2410.06916)",
            drafter=Swift,
            build=lambda parts: build_swift(layered(parts.target, "swift"), parts.options, parts.draws),
            options=SwiftOptions,
            defaults={"num_draft_tokens": 25},
        ),
        "del": MethodRow(
            summary="early exit whose layer and length follow how well every exit would have done",
            paper="Entezari Zarch et al. 2025, DEL (arXiv 2504.05598)",
            drafter=DynamicExit,
            build=lambda parts: DynamicExit(layered(parts.target, "del"), parts.options, draws=parts.draws),
            options=DynamicExitOptions,
            defaults={"num_draft_tokens": 18},
        ),
        **HEAD_ROWS,
        "hybrid": MethodRow(
            summary="several drafters in one tree, places by their measured acceptance",
            paper="Quan et al. 2025, RASD's fusion (arXiv 2503.03434); the arbitration is our own",
            drafter=Fused,
            build=_build_hybrid,
            options=HybridOptions,
            defaults={"num_draft_tokens": 8, "num_tree_nodes": 16},
            parts="parts",
        ),
        "rasd": MethodRow(
            summary="retrieved branches, weeded by a draft model and fused with its tree",
            paper="Quan et al. 2025, RASD (arXiv 2503.03434)",
            drafter=Rasd,
            build=_build_rasd,
            options=RasdOptions,
            defaults={"num_draft_tokens": 12, "num_tree_nodes": 24, "tree": True},
            needs_draft=True,
            parts="retriever",
        ),
        "cascade": MethodRow(
            summary="a draft model whose own guesses are speculated by a cheaper drafter",
            paper="Spector & Re 2023 (arXiv 2308.04623), Chen et al. 2023 (arXiv 2312.11462)",
            drafter=Cascade,
            build=_build_cascade,
            options=CascadeOptions,
            defaults={"num_draft_tokens": 8, "memory_tokens": 0},
            needs_draft=True,
            parts="inner",
        ),
        "tli": MethodRow(
            summary="a draft model with another tokenizer guesses the tokens both have",
            paper="Timor et al. 2025, TLI (arXiv 2502.05202)",
            drafter=SharedTokens,
            build=_build_tli,
            needs_draft=True,
            foreign=True,
        ),
        "reencode": MethodRow(
            summary="a draft model with any tokenizer writes text, cut anew into the target's tokens",
            paper="Timor et al. 2025, SLEM (arXiv 2502.05202); Hugging Face's universal assisted generation",
            drafter=Reencode,
            build=_build_reencode,
            needs_draft=True,
            foreign=True,
        ),
    },
)

RULES: Catalog[RuleRow] = Catalog(
    "acceptance rule",
    {
        "coupled": RuleRow(Coupled, "keep guesses equal to the target's own seeded choice", "docs/lossless.md"),
        "rejection": RuleRow(Rejection, "token-wise rejection sampling", "arXiv 2211.17192, 2302.01318"),
        "block": RuleRow(Block, "rejection sampling of the whole block", "Sun et al. 2024 (arXiv 2403.10444)"),
        "recursive": RuleRow(
            Recursive, "rejection sampling sibling by sibling on a tree", "arXiv 2305.09781, 2402.12374, 2402.14160"
        ),
        "traversal": RuleRow(Traversal, "a tree judged from its leaves", "Weng et al. 2025 (arXiv 2505.12398)"),
        "kseq": RuleRow(KSeq, "several independent guesses judged together", "Sun et al. 2023 (arXiv 2310.15141)"),
        "delta": RuleRow(Delta, "each guess accepted with its own probability under the target", "docs/lossless.md"),
        "typical": RuleRow(Typical, "keeps what is typical of the target", "arXiv 2401.10774", TypicalOptions),
        "lenient": RuleRow(Lenient, "rejection sampling with q scaled down", "arXiv 2211.17192", LenientOptions),
        "top-k": RuleRow(TopK, "keeps guesses among the target's k likeliest", "arXiv 1811.03115", TopKOptions),
        "threshold": RuleRow(ThresholdRule, "keeps guesses that are likely enough", "docs/lossy.md", ThresholdRuleOptions),
        "divergence": RuleRow(Divergence, "keeps guesses where q is near p", "arXiv 2502.20704", DivergenceOptions),
    },
)

POLICIES: Catalog[PolicyRow] = Catalog(
    "policy",
    {
        "fixed": PolicyRow(Fixed, FixedOptions, "the same length every round"),
        "adaptive": PolicyRow(Adaptive, AdaptiveOptions, "the length with most tokens per second by measured costs, or none"),
        "optimal": PolicyRow(Optimal, OptimalOptions, "the best length by measured acceptance and cost"),
        "heuristic": PolicyRow(Heuristic, HeuristicOptions, "longer after a fully accepted draft, shorter after a rejection"),
        "bandit": PolicyRow(Bandit, BanditOptions, "lengths as the arms of a bandit, rewarded by tokens per second"),
        "confidence": PolicyRow(Confidence, ConfidenceOptions, "stop after a guess the draft is not sure of"),
        "entropy": PolicyRow(Entropy, EntropyOptions, "stop before a guess the draft is too uncertain about"),
        "threshold": PolicyRow(Threshold, ThresholdOptions, "stop when some guess has probably been rejected"),
    },
)


TABLES = Tables(METHODS, RULES, POLICIES)
rows_of = TABLES.rows_of


def register(name: str, row: MethodRow) -> None:
    """Add a method from outside: ``LLM(method=name)``, the command line, bench, tune, audit and the server then know it.

    A package does the same without a call, by an entry point of the group ``outrider.methods`` whose object is the row."""
    if not isinstance(row, MethodRow):
        raise OptionError(f"method {name!r} is registered as {row!r}; give a MethodRow (see docs/extending.md)")
    agree_on_draws(row.drafter, RULES[row.acceptance].rule)
    POLICIES[row.policy]
    METHODS.add(name, row)


def compose(
    name: str,
    target: Target,
    *,
    draft: Target | Sequence[Target] | None = None,
    acceptance: str | None = None,
    policy: str = "fixed",
    options: Mapping[str, Any] | None = None,
    translation: Translation | None = None,
) -> Method:
    """A method ready to run. Everything that does not fit is refused here, with both sides named."""
    drafts = () if draft is None else (draft,) if isinstance(draft, Target) else tuple(draft)
    choice = Choice(name, acceptance, policy, dict(options or {}))
    choice.check(TABLES, num_drafts=len(drafts), translates=translation is not None)
    row, rule_row, policy_row, given = METHODS[name], choice.rule(TABLES), POLICIES[policy], choice.given(TABLES)
    draws = agree_on_draws(row.drafter, rule_row.rule)
    part = partial(_build_part, target=target, drafts=drafts, given=given)
    first = drafts[0] if drafts else None
    drafter = row.build(Parts(target, first, draws, fill(row.options, given), drafts, translation, part))
    return Method(drafter, rule_row.build(given), policy_row.build(fill(policy_row.options, given)))


def _build_part(
    name: str, *, target: Target, drafts: tuple[Target, ...], given: Mapping[str, Any], skip_drafts: int = 0
) -> Drafter:
    """The drafter of a row that is part of another. Its guesses are chosen ones."""
    row = METHODS[name]
    mine = {**(row.defaults or {}), **given}
    left = drafts[skip_drafts:]
    if row.needs_draft and not left:
        raise CompositionError(
            f"part {name!r} needs a draft model of its own after the first {skip_drafts}; give one more in draft=, "
            "or use 'prompt-lookup'"
        )
    first = left[0] if left else None
    return row.build(Parts(target, first, Draws.DETERMINISTIC, fill(row.options, mine), left))


each_entry_point("outrider.methods", register)
