"""The one-step loss of every lossy rule on the bundled pair, as `outrider audit bundled all` measures it, over more contexts.

Each lossy rule of the rule table runs at its defaults, with the first row of the method table whose guesses it takes. Its loss
is the total variation between the first token it emits and the target's law, in closed form, with the draft model's law as q.
Beside it stands the distance over texts of toy models, by enumeration. A rule that cannot run is listed with the reason.

    python benchmarks/audit_rules.py [--contexts 16] [--out benchmarks/results/audit_rules.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lossy_tv import PROMPTS

from outrider import LLM
from outrider.bench.audit.catalogue import every_setting
from outrider.bench.audit.config import AuditConfig
from outrider.bench.audit.loss import Text, judge_loss
from outrider.bench.audit.proof import prove
from outrider.bench.provenance import keep_results
from outrider.bench.settings import BASELINE, Setting
from outrider.methods import RULES


def row_of(llm: LLM, setting: Setting, texts: Sequence[Text], config: AuditConfig) -> dict[str, Any]:
    """What one rule loses on the texts, and over toy models."""
    method = setting.compose(llm)
    draws = method.drafter.draws
    toys = prove(method.rule, draws, num_pairs=config.num_pairs).data
    loss = judge_loss(method.rule, draws, (llm.target, llm.draft), texts, config.sampled(1)).data
    found = {"TV mean": loss["tv_mean"], "TV max": loss["tv_max"], "by enumeration": toys["mean_distance"]}
    rounded = {name: round(float(value), 4) for name, value in found.items()}
    note = "" if rounded["TV max"] else "exact at its defaults here"
    return {"rule": f"`{setting.acceptance}`", "guesses of": f"`{setting.method}`, {draws.value}", **rounded, "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=16, help="positions of each text")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of toy models")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    config = AuditConfig(max_tokens=arguments.contexts, num_pairs=arguments.pairs)
    llm = LLM(method="draft-model", dtype="float32")
    written = llm.generate(PROMPTS, config.sampled(1), method=llm.compose(BASELINE))
    texts = [(list(one.prompt_token_ids), list(one.token_ids)) for one in written]
    settings, skipped = every_setting(llm, lambda _: None, "fixed")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for setting in settings:
            if setting.acceptance is not None and not setting.lossless:
                rows.append(row_of(llm, setting, texts, config))
                print(rows[-1], flush=True)
    rows += [{"rule": f"`{one.label}`", "note": f"skipped: {one.reason}"} for one in skipped if one.label in RULES]
    what = f"one-step loss of lossy rules at their defaults, bundled pair, {len(PROMPTS) * arguments.contexts} contexts"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/audit_rules.py")))


if __name__ == "__main__":
    main()
