"""How far does a draft come back on prompts that never repeat, update by update? Without a server.

    python benchmarks/learn_offline.py [--text sums] [--method eagle3] [--served 400] [--updates 40] [--set NAME=VALUE ...]

The bundled target answers prompts of an application (``benchmarks/shifts.py``), each asked once. The bundled draft or heads,
which know stories, learn from these answers by the updates of ``serve --learn``, one after the other, with all of them at hand
from the beginning. After each update the weights that would serve are measured on answers to other prompts: tokens per pass
along the target's text. ``home`` is that on stories. With many updates and ``--set margin=-9``, which serves every update, the
best of them is what learning from so many texts can bring at all. Each update is told on standard error. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from learn_run import online_settings  # pyright: ignore[reportMissingImports]
from shifts import HOME, TEXTS, shifted  # pyright: ignore[reportMissingImports]

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.cli.serve_learning import taught
from outrider.core.request import Origin
from outrider.models.load import load_model
from outrider.train.data import Document
from outrider.train.objective import accepted_length
from outrider.train.online import OnlineLearner
from outrider.train.taught_states import TaughtStates


def answered(llm: LLM, prompts: Sequence[Any], num_tokens: int) -> list[Document]:
    """The target's answers, each with where it begins."""
    each = [SamplingParams(max_tokens=num_tokens, temperature=0.3, seed=i, ignore_eos=True) for i in range(len(prompts))]
    outputs = llm.generate(list(prompts), each, method=llm.compose("plain"))
    return [Document((*one.prompt_token_ids, *one.token_ids), len(one.prompt_token_ids)) for one in outputs]


class Study:
    """Texts, and what learns from them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, llm = given, LLM(method=given.method, max_batch_size=16)
        served, unseen = (shifted(given.text, llm, count, seed) for seed, count in enumerate((given.served, given.unseen)))
        self.served, self.unseen = answered(llm, served, given.max_tokens), answered(llm, unseen, given.max_tokens)
        self.home = answered(llm, shifted(HOME, llm, given.unseen, 1), given.max_tokens)
        found = taught(llm, online_settings(given.set, update_every=1))
        assert found is not None and isinstance(found.learner, OnlineLearner), "nothing is taught by this method"
        self.learner, pupil = found.learner, found.learner.pupil
        self.states = TaughtStates(load_model(llm.model_name, fast=False), pupil.taps, 10**9)

    def tokens_per_pass(self, documents: Sequence[Document]) -> float:
        """With the weights that serve."""
        judge = self.learner.pupil.objective(self.learner.module)
        with torch.no_grad():
            return accepted_length([judge(self.states.packed(documents[i : i + 8])) for i in range(0, len(documents), 8)])

    def updates(self) -> Iterator[dict[str, Any]]:
        """What each update brought."""
        for document in self.served:
            self.learner.observe(*_parted(document))
        again = cycle(self.served)  # their number is a multiple of held_every, so what was held out is held out again
        for number in range(1, self.given.updates + 1):
            while len(self.learner.judgements) < number:
                self.learner.observe(*_parted(next(again)))  # an update waits for something new
                self.learner.maybe_update()
            judged, unseen = self.learner.judgements[-1], self.tokens_per_pass(self.unseen)
            yield {"updates": number, "unseen": unseen, "swapped": judged.swapped, "gate": [judged.served, judged.learned]}

    def row(self) -> dict[str, Any]:
        """Where it began, the best of all updates, and the end."""
        home, before, rows = self.tokens_per_pass(self.home), self.tokens_per_pass(self.unseen), list[dict[str, Any]]()
        for row in self.updates():
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
        asked = {name: vars(self.given)[name] for name in ("text", "method", "set", "served", "updates")}
        return {**asked, **told(home, before, rows), "home_afterwards": self.tokens_per_pass(self.home)}


def told(home: float, before: float, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per pass on stories, and on the new text: before, at the best of all updates, and after the last one."""
    best = max(rows, key=lambda row: row["unseen"])
    figures = {"home": home, "before": before, "best": best["unseen"], "at_update": best["updates"], "end": rows[-1]["unseen"]}
    return {**figures, "recovered_at_best": (best["unseen"] - before) / (home - before)}


def _parted(document: Document) -> tuple[Sequence[int], Sequence[int], list[Origin]]:
    answer = document.tokens[document.begin :]
    return document.tokens[: document.begin], answer, [Origin.BONUS] * len(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=TEXTS, default="sums", help="what is asked for (default: %(default)s)")
    parser.add_argument("--method", default="draft-model")
    parser.add_argument("--served", type=int, default=400, help="prompts that are learned from")
    parser.add_argument("--unseen", type=int, default=60, help="prompts that measure")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings (OnlineSettings)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    what = "tokens per pass on prompts never served, after updates that had all served texts at hand"
    print(json.dumps(keep_results(arguments.out, what, [Study(arguments).row()], script="benchmarks/learn_offline.py")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
