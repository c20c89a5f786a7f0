"""lm-eval against the server, with and without speculation: same scores, same log-likelihoods, same texts.

    python scripts/lm_eval_check.py [--packages FOLDER] [--out FILE]

Writes two tasks of ten questions into a temporary folder and runs them through lm-eval's ``local-completions`` against
``outrider serve`` with the bundled pair. One server runs with ``--method plain``, once with a draft model that guesses in every
round. The first task chooses among three endings by log-likelihood, which reads prompts. The second one writes an ending, which
is where guesses are made. Nothing but the server is asked, because the tokenizer is the bundled one and the questions are here.
``--packages`` names a folder that ``pip install --target FOLDER 'lm-eval[api]'`` filled. The last line is JSON. The exit code
is 1 if anything differs, or if the run with guesses made none or the plain run made some.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from client_checks import MODEL
from clients import served

import outrider
from outrider.bench.provenance import keep_results

CONTEXT = 256
"""Tokens lm-eval believes the model can read; more than any question has."""
SERVERS = {"plain": ("--method", "plain"), "speculative": ("--method", "draft-model", "--num-draft-tokens", "4")}
QUESTIONS = (
    ("Tom was very thirsty. He wanted to drink some", [" water", " shoes", " stones"], 0),
    ("It was raining outside, so Lily took her", [" spoon", " umbrella", " pillow"], 1),
    ("The little dog wagged its tail and barked because it was", [" purple", " paper", " happy"], 2),
    ("At night, Mia went to her room and got into her", [" bed", " soup", " river"], 0),
    ("The bird opened its wings and began to", [" read", " fly", " cook"], 1),
    ("Ben fell down and hurt his", [" cloud", " song", " knee"], 2),
    ("Mom baked a big chocolate", [" cake", " tree", " window"], 0),
    ("The sun was hot and the ice cream started to", [" sing", " melt", " jump"], 1),
    ("Sara lost her toy, and she felt very", [" green", " round", " sad"], 2),
    ("The fish lived in the", [" pond", " oven", " hat"], 0),
)
_FIRST_WORD = {"function": "regex", "regex_pattern": r"^\s*(\w+)"}
TASKS: dict[str, dict[str, Any]] = {
    "outrider_choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "outrider_write": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer].strip()}}",
        "filter_list": [{"name": "first word", "filter": [_FIRST_WORD, {"function": "take_first"}]}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "temperature": 0.7},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path) -> None:
    """The questions, and a file per task that lm-eval reads; JSON is YAML."""
    lines = [json.dumps({"start": start, "choices": choices, "answer": answer}) for start, choices, answer in QUESTIONS]
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(lines) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "doc_to_text": "{{start}}", **data, **task}))


def evaluate(address: str, folder: Path) -> dict[str, Any]:
    """Scores by task, and what the model said to every question."""
    from lm_eval import simple_evaluate  # pyright: ignore
    from lm_eval.tasks import TaskManager  # pyright: ignore

    tokenizer = str(Path(outrider.__file__).parent / "bundled" / "target")
    known = {"model": MODEL, "base_url": f"{address}/v1/completions", "tokenizer": tokenizer, "max_length": CONTEXT}
    asked = {**known, "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: Any = simple_evaluate(
        model="local-completions", model_args=asked, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )
    said = {name: [sample["resps"] for sample in _in_order(samples)] for name, samples in found["samples"].items()}
    return {"scores": {name: _score(found["results"][name]) for name in TASKS}, "said": said}


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def _score(result: dict[str, Any]) -> float:
    return next(value for name, value in result.items() if name.startswith(("acc,", "exact_match,")))


def num_guesses(address: str) -> int:
    """Tokens that were guessed since the server started."""
    with urlopen(f"{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return int(sum(float(value) for value in re.findall(r"^outrider:spec_decode_num_draft_tokens_total\S* (\S+)$", text, re.M)))


def compared(plain: dict[str, Any], fast: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per task: scores, and how many of the model's answers are the same."""
    rows = list[dict[str, Any]]()
    for name in TASKS:
        pairs = list(zip(plain["said"][name], fast["said"][name], strict=True))
        scores = {"score": plain["scores"][name], "score_with_guesses": fast["scores"][name]}
        same = sum(one == other for one, other in pairs)
        rows.append({"task": name, "questions": len(pairs), **scores, "same_answers": same})
    guessed = {"tokens_guessed": plain["guesses"], "tokens_guessed_with_guesses": fast["guesses"]}
    return [{**row, **guessed, "lm_eval": version("lm_eval")} for row in rows]


def is_well(rows: list[dict[str, Any]]) -> bool:
    """Everything is the same, and only the server that was to guess did."""
    return all(
        row["score"] == row["score_with_guesses"]
        and row["same_answers"] == row["questions"]
        and row["tokens_guessed_with_guesses"] > 0 == row["tokens_guessed"]
        for row in rows
    )


def run(folder: Path) -> list[dict[str, Any]]:
    write_tasks(folder)
    found: dict[str, dict[str, Any]] = {}
    for name, options in SERVERS.items():
        with served(*options) as address:
            found[name] = {**evaluate(address, folder), "guesses": num_guesses(address)}
    return compared(found["plain"], found["speculative"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", help="folder with lm-eval, if it is not installed")
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(arguments.packages)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder}/cache"}
        rows = run(Path(folder))
    what = "lm-eval's local-completions against a server without guesses and one that guesses four tokens in every round"
    print(json.dumps(keep_results(arguments.out, what, rows, script="scripts/lm_eval_check.py")))
    return 0 if is_well(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
