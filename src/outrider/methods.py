"""THE TABLE: every method by name, as one choice per stage.

A method's file under ``drafters/`` has the method's name and declares its ``ROW``: summary, paper, options, how it is built.
The acceptance rules and the policies have their own short tables, so any row can be run with any rule that is exact for it.
Adding a method is one file, one line here and one page under ``docs/methods/``; the contract tests run over these tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.acceptance import Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal
from outrider.acceptance.divergence import Divergence, DivergenceOptions
from outrider.acceptance.fly import Fly, FlyOptions
from outrider.acceptance.gsd import Grouped, GroupedOptions, GroupedPartition, PartitionOptions
from outrider.acceptance.judge import Judge, JudgeOptions
from outrider.acceptance.lantern import Lantern, LanternOptions, LanternPlus, LanternPlusOptions
from outrider.acceptance.lenient import Lenient, LenientOptions
from outrider.acceptance.threshold import ThresholdRule, ThresholdRuleOptions
from outrider.acceptance.top_k_rule import TopK, TopKOptions
from outrider.acceptance.typical import TypicalAcceptance, TypicalOptions
from outrider.acceptance.unverified import Unverified, UnverifiedOptions
from outrider.core.catalog import Catalog
from outrider.core.choice import Choice, Tables
from outrider.core.draft import Draws
from outrider.core.entry_points import each_entry_point
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Drafter, Target
from outrider.core.method import Method, agree_on_draws
from outrider.core.method_rows import ExecutorOptions, MethodRow, Parts, PolicyRow, RuleRow, fill
from outrider.core.translation import Translation
from outrider.drafters import plain
from outrider.drafters.beside import beside
from outrider.drafters.copying import ngram_cache, prompt_lookup, reference, rest, suffix
from outrider.drafters.heads import (
    chimera,
    dflash,
    dspark,
    eagle1,
    eagle3,
    falcon,
    fspad,
    hydra,
    l_mtp,
    longspec,
    medusa,
    mlp_speculator,
    msd,
    mtp,
    mtp_parallel,
    p_eagle,
    redrafter,
    specvlm,
    vispec,
)
from outrider.drafters.itself import (
    del_,
    draft_verify,
    early_exit,
    jacobi,
    kangaroo,
    lookahead,
    sjd,
    sjd_coupled,
    specee,
    swift,
    token_recycling,
)
from outrider.drafters.mixed import cascade, hybrid, multi_draft, rasd
from outrider.drafters.model import best_first, draft_model, draft_tree, pearl, reencode, rsd_s, s2d, sequoia, spectr, tli
from outrider.policies.adaptive import Adaptive
from outrider.policies.bandit import Bandit, BanditOptions
from outrider.policies.confidence import Confidence, ConfidenceOptions
from outrider.policies.entropy import Entropy, EntropyOptions
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.policies.heuristic import Heuristic, HeuristicOptions
from outrider.policies.optimal import Optimal, OptimalOptions
from outrider.policies.threshold import Threshold, ThresholdOptions
from outrider.policies.tuning import AdaptiveOptions

METHODS: Catalog[MethodRow] = Catalog(
    "method",
    {
        "plain": plain.ROW,
        "draft-model": draft_model.ROW,
        "pearl": pearl.ROW,
        "s2d": s2d.ROW,
        "draft-tree": draft_tree.ROW,
        "best-first": best_first.ROW,
        "sequoia": sequoia.ROW,
        "rsd-s": rsd_s.ROW,
        "spectr": spectr.ROW,
        "multi-draft": multi_draft.ROW,
        "prompt-lookup": prompt_lookup.ROW,
        "suffix": suffix.ROW,
        "ngram-cache": ngram_cache.ROW,
        "reference": reference.ROW,
        "rest": rest.ROW,
        "token-recycling": token_recycling.ROW,
        "jacobi": jacobi.ROW,
        "sjd": sjd.ROW,
        "sjd-coupled": sjd_coupled.ROW,
        "lookahead": lookahead.ROW,
        "early-exit": early_exit.ROW,
        "kangaroo": kangaroo.ROW,
        "draft-verify": draft_verify.ROW,
        "swift": swift.ROW,
        "del": del_.ROW,
        "specee": specee.ROW,
        "medusa": medusa.ROW,
        "hydra": hydra.ROW,
        "eagle1": eagle1.ROW,
        "eagle3": eagle3.ROW,
        "fspad": fspad.ROW,
        "falcon": falcon.ROW,
        "chimera": chimera.ROW,
        "mlp-speculator": mlp_speculator.ROW,
        "redrafter": redrafter.ROW,
        "mtp": mtp.ROW,
        "mtp-parallel": mtp_parallel.ROW,
        "l-mtp": l_mtp.ROW,
        "p-eagle": p_eagle.ROW,
        "dflash": dflash.ROW,
        "dspark": dspark.ROW,
        "longspec": longspec.ROW,
        "msd": msd.ROW,
        "vispec": vispec.ROW,
        "specvlm": specvlm.ROW,
        "hybrid": hybrid.ROW,
        "rasd": rasd.ROW,
        "cascade": cascade.ROW,
        "tli": tli.ROW,
        "reencode": reencode.ROW,
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
        "transport": RuleRow(
            Transport, "the best of several independent guesses, by optimal transport", "Sun et al. 2023 (arXiv 2310.15141)"
        ),
        "delta": RuleRow(Delta, "each guess accepted with its own probability under the target", "docs/lossless.md"),
        "typical": RuleRow(TypicalAcceptance, "keeps what is typical of the target", "arXiv 2401.10774", TypicalOptions),
        "lenient": RuleRow(Lenient, "rejection sampling with q scaled down", "arXiv 2211.17192", LenientOptions),
        "top-k": RuleRow(TopK, "keeps guesses among the target's k likeliest", "arXiv 1811.03115", TopKOptions),
        "threshold": RuleRow(ThresholdRule, "keeps guesses that are likely enough", "docs/lossy.md", ThresholdRuleOptions),
        "judge": RuleRow(
            Judge, "keeps guesses that a trained head finds harmless", "arXiv 2501.19309", JudgeOptions, needs=("judge",)
        ),
        "fly": RuleRow(Fly, "takes a refusal back where the target goes along", "arXiv 2511.22972", FlyOptions),
        "unverified": RuleRow(Unverified, "keeps what a drafter went on from", "arXiv 2504.08850", UnverifiedOptions),
        "divergence": RuleRow(Divergence, "keeps guesses where q is near p", "arXiv 2502.20704", DivergenceOptions),
        "lantern": RuleRow(Lantern, "keeps a guess for its neighbours in the codebook", "arXiv 2410.03355", LanternOptions),
        "lantern++": RuleRow(LanternPlus, "as lantern, in proportion to the guess", "arXiv 2502.06352", LanternPlusOptions),
        "gsd": RuleRow(Grouped, "keeps a guess by the probability of its group", "arXiv 2508.07747", GroupedOptions),
        "gsd-partition": RuleRow(
            GroupedPartition, "as gsd, with fixed groups: exact on groups", "arXiv 2508.07747", PartitionOptions
        ),
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
    """A method ready to run. Parts that cannot be combined are refused, with both named."""
    if not target.traits.says_all:
        raise CompositionError(
            "the target has a reduced vocabulary (outrider trim), so it can only draft; use it as draft=, not as model"
        )
    drafts = () if draft is None else (draft,) if isinstance(draft, Target) else tuple(draft)
    choice = Choice(name, acceptance, policy, dict(options or {}))
    choice.check(TABLES, num_drafts=len(drafts), translates=translation is not None)
    row, rule_row, policy_row, given = METHODS[name], choice.rule(TABLES), POLICIES[policy], choice.given(TABLES)
    draws = agree_on_draws(row.drafter, rule_row.rule)
    part = partial(_build_part, target=target, drafts=drafts, given=given)
    first = drafts[0] if drafts else None
    drafter = row.build(Parts(target, first, draws, fill(row.options, given), drafts, translation, part))
    method = Method(drafter, rule_row.build(given), policy_row.build(fill(policy_row.options, given)))
    return replace(method, drafter=beside(name, drafter)) if fill(ExecutorOptions, given).beside else method


def _build_part(
    name: str, *, target: Target, drafts: tuple[Target, ...], given: Mapping[str, Any], skip_drafts: int = 0
) -> Drafter:
    """The drafter of a row that is part of another row. Its guesses are chosen, not sampled."""
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
