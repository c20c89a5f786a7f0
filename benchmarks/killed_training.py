"""A training run of two processes is killed and goes on with one: losses, and which documents were read.

    python benchmarks/killed_training.py [--steps 24] [--kill-at 15] [--save-every 6] [--out FILE]

EAGLE-3 heads of the bundled target learn from texts that it wrote. `torchrun` starts two processes on gloo. Once they have
done `--kill-at` steps, all of them get SIGKILL, between two saves. One process goes on from the last save to the end. A third
run does all steps with one process and is not disturbed. Every process notes the loss and the documents of each step.

Steps of the killed run count up to its last save; the rest are those of the process that went on. The last line is JSON. The
exit code is 1 if a document of an epoch was lost or read twice, or if a loss differs by more than 1 % from the whole run's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.models.heads import new_head
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.heads.folder import new_config
from outrider.models.load import load_model
from outrider.train.data import Corpus, Document, digest_of
from outrider.train.devices import current_team, team_of_torchrun
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings
from outrider.train.run import Run

_LEN = 40
"""Tokens of every text: the mean of two processes' means is then the mean of all."""
Notes = dict[int, dict[str, Any]]
"""By step: the mean loss of all processes, and the documents that they read."""


def write_texts(path: Path, count: int) -> None:
    """Texts of the bundled target."""
    llm = LLM(device="cpu")
    sampling = [SamplingParams(max_tokens=_LEN, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(count)]
    found = llm.generate(["Once upon a time"] * count, sampling)
    path.write_text("".join(json.dumps(list(one.token_ids)[:_LEN]) + "\n" for one in found), encoding="utf-8")


def worker(arguments: argparse.Namespace) -> None:
    """One process of a run: trains, and notes what it did."""
    with team_of_torchrun("cpu"):
        torch.set_num_threads(1)
        rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()]
        corpus = Corpus.of([Document(tuple(row), 1) for row in rows], held_out=4)
        target = load_model(bundled_path("target"), dtype="float32", device="cpu")
        raw, ends = read_target(bundled_path("target"))
        head = new_head(new_config("eagle3", raw), ends)
        objective = HeadObjective(head.float(), target, HeadSettings(num_depths=2))
        noted = arguments.folder / f"notes-{current_team().rank}-{os.getpid()}.jsonl"
        _note_steps(objective, noted)
        often = {"max_steps": arguments.steps, "judge_every": arguments.steps, "save_every": arguments.save_every}
        settings = Settings(batch_size=4, row_len=2 * _LEN, bf16=False, **often)
        train([objective], target, corpus, arguments.folder, settings=settings)


def _note_steps(objective: HeadObjective, path: Path) -> None:
    """Every step becomes a line, before the next begins."""
    learn, write, read = Run.learn, objective.write, list[str]()

    def noted_write(documents: Sequence[Document], step: int) -> Sequence[Document]:
        read[:] = [digest_of(document).hex() for document in documents]
        return write(documents, step)

    def noted_learn(run: Run, loss: torch.Tensor, settings: Settings, step: int) -> float:
        value = learn(run, loss, settings, step)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": value, "read": read}) + "\n")
        return value

    objective.write = noted_write  # type: ignore[method-assign]
    Run.learn = noted_learn  # type: ignore[method-assign]


def started(arguments: argparse.Namespace, folder: Path, data: Path, num_processes: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    options = ["--worker", "--data", str(data), "--folder", str(folder)]
    options += ["--steps", str(arguments.steps), "--save-every", str(arguments.save_every)]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"] if num_processes > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *several, __file__, *options], env=env, start_new_session=True)


def notes_of(paths: Sequence[Path]) -> Notes:
    found: Notes = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            step = found.setdefault(one["step"], {"losses": [], "read": []})
            step["losses"].append(one["loss"])
            step["read"] += one["read"]
    return {step: {"loss": sum(one["losses"]) / len(one["losses"]), "read": one["read"]} for step, one in found.items()}


def kill_after(process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    """SIGKILL to every process of the run when all ranks have done so many steps."""
    while process.poll() is None:
        files = list(folder.glob("notes-*.jsonl"))
        done = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
        if len(done) == 2 and min(done) >= steps:
            break
        time.sleep(0.02)
    if process.poll() is not None:
        raise SystemExit("the run ended before it was killed; its errors are above")
    for rank in folder.glob("notes-*.jsonl"):  # torchrun gives its processes sessions of their own
        os.kill(int(rank.stem.split("-")[2]), signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judged(killed: Notes, gone_on: Notes, whole: Notes, saved: int) -> list[dict[str, Any]]:
    """Every step of the run that was killed and went on, beside the whole run's."""
    rows = []
    for step in sorted(whole):
        mine = killed[step] if step < saved else gone_on[step]
        ranks = 2 if step < saved else 1
        row = {"step": step, "processes": ranks, "loss": mine["loss"], "loss_whole": whole[step]["loss"]}
        rows.append({**row, "read": mine["read"], "same_documents": Counter(mine["read"]) == Counter(whole[step]["read"])})
    return rows


def wrong_documents(rows: Sequence[Mapping[str, Any]], count: int) -> int:
    """Documents of whole epochs that were lost or read twice."""
    read = [digest for row in rows for digest in row["read"]]
    epochs = [Counter(read[begin : begin + count]) for begin in range(0, len(read) - count + 1, count)]
    return sum(abs(times - 1) for epoch in epochs for times in epoch.values()) + sum(count - len(epoch) for epoch in epochs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kill-at", type=int, default=15)
    parser.add_argument("--save-every", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    for name, kind in (("--worker", None), ("--data", Path), ("--folder", Path)):
        how: dict[str, Any] = {"type": kind} if kind else {"action": "store_true"}
        parser.add_argument(name, help=argparse.SUPPRESS, **how)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    with tempfile.TemporaryDirectory() as home:
        data, folders = Path(home) / "texts.jsonl", {name: Path(home) / name for name in ("killed", "whole")}
        write_texts(data, 28)
        first = started(arguments, folders["killed"], data, 2)
        kill_after(first, folders["killed"], arguments.kill_at)
        before = list(folders["killed"].glob("notes-*.jsonl"))
        saved = int(torch.load(folders["killed"] / "state.pt", weights_only=True)["step"])
        codes = [started(arguments, folders[name], data, 1).wait() for name in ("killed", "whole")]
        after = [path for path in folders["killed"].glob("notes-*.jsonl") if path not in before]
        rows = judged(notes_of(before), notes_of(after), notes_of(list(folders["whole"].glob("notes-*.jsonl"))), saved)
    wrong = wrong_documents(rows, 24)
    worst = max(abs(row["loss"] / row["loss_whole"] - 1) for row in rows)
    told = [{name: value for name, value in row.items() if name != "read"} for row in rows]
    what = "a training run of two processes, killed, goes on with one"
    document = results_head(what, script="benchmarks/killed_training.py") | {"killed_after": arguments.kill_at}
    document |= {"saved_at": saved, "wrong_documents": wrong, "largest_difference_of_loss": worst, "rows": told}
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 1 if any(codes) or wrong or worst > 0.01 or not all(row["same_documents"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
