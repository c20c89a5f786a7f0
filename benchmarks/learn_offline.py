"""How far does a draft come back on text that never repeats, by updates and learning rate? Without a server.

    python benchmarks/learn_offline.py [--served 400] [--unseen 60] [--updates 24] [--rates 3e-4 1e-3] [--out FILE]

The bundled target answers passages of the manual, each asked once. The bundled draft, which knows stories, learns from these
answers by the updates of ``serve --learn``, one after the other, as in idle time. After each update the draft that would serve
is measured on answers to other passages: tokens per pass of greedy chains of four along the target's text. ``home`` is that on
stories. So the table tells learning too little (later rows are better) from having learned all there is (they are not).
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learn_run import BEGINNINGS, passages  # pyright: ignore[reportMissingImports]

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.request import Origin
from outrider.models.load import load_model
from outrider.train.data import Document
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import accepted_length
from outrider.train.online import OnlineSettings, online_draft
from outrider.train.pupils import DraftPupil
from outrider.train.taught_states import TaughtStates


def answered(llm: LLM, prompts: Sequence[Any], num_tokens: int) -> list[Document]:
    """The target's answers, each with where it begins."""
    each = [SamplingParams(max_tokens=num_tokens, temperature=0.3, seed=i, ignore_eos=True) for i in range(len(prompts))]
    outputs = llm.generate(list(prompts), each, method=llm.compose("plain"))
    return [Document((*one.prompt_token_ids, *one.token_ids), len(one.prompt_token_ids)) for one in outputs]


class Study:
    """Texts, and a target that knows their laws."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        llm, given = LLM(max_batch_size=16), arguments
        self.given = given
        self.served = answered(llm, passages(llm, given.served, given.prompt_len, 0) * given.answers, given.max_tokens)
        self.unseen = answered(llm, passages(llm, given.unseen, given.prompt_len, 1), given.max_tokens)
        self.home = answered(llm, [BEGINNINGS[i % len(BEGINNINGS)] for i in range(given.unseen)], given.max_tokens)
        self.target = load_model(bundled_path("target"), fast=False)
        self.states = TaughtStates(self.target, (), 10**9)

    def draft(self) -> DraftLM:
        return DraftLM.load(bundled_path("draft"), self.target.device)

    def tokens_per_pass(self, draft: torch.nn.Module, documents: Sequence[Document]) -> float:
        pupil = DraftPupil(self.draft(), self.target, OnlineSettings().lesson, torch.float32)
        with torch.no_grad():
            parts = [self.states.packed(documents[i : i + 8]) for i in range(0, len(documents), 8)]
            return accepted_length([pupil.objective(draft)(part) for part in parts])

    def rows(self, rate: float) -> list[dict[str, Any]]:
        """What each update at a learning rate brought."""
        learner = online_draft(self.draft(), self.target, OnlineSettings(learning_rate=rate, update_every=1))
        last = self.given.updates
        for document in self.served[:-last]:
            learner.observe(*_parted(document))
        rows = [{"rate": rate, "updates": 0, "unseen": self.tokens_per_pass(learner.module, self.unseen)}]
        for number, document in enumerate(self.served[-last:], 1):
            learner.observe(*_parted(document))
            learner.maybe_update()
            judged = learner.judgements[-1]
            seen = {"unseen": self.tokens_per_pass(learner.module, self.unseen), "swapped": judged.swapped}
            rows.append({"rate": rate, "updates": number, **seen, "gate": [judged.served, judged.learned]})
            print(json.dumps(rows[-1]), file=sys.stderr)
        return rows


def _parted(document: Document) -> tuple[Sequence[int], Sequence[int], list[Origin]]:
    answer = document.tokens[document.begin :]
    return document.tokens[: document.begin], answer, [Origin.BONUS] * len(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--served", type=int, default=400, help="passages that are learned from")
    parser.add_argument("--unseen", type=int, default=60, help="passages that measure")
    parser.add_argument("--answers", type=int, default=1, help="answers to each of them, with other seeds")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    study = Study(arguments)
    home = study.tokens_per_pass(study.draft(), study.home)
    found = {"home": home, "rows": [row for rate in arguments.rates for row in study.rows(rate)]}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
