"""Two processes train what one does: the same weights, one set of files, resumable by either."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from forked import can_fork
from safetensors.torch import load_file
from tiers import repeats

from outrider.bundled import bundled_path
from outrider.cli.main import main

Start = Callable[[list[str]], None]
DRAFT = "-O num_hidden_layers=1 -O hidden_size=32 -O num_attention_heads=2 -O num_key_value_heads=1 -O intermediate_size=48"


def arguments(kind: str, data: Path, out: Path, steps: int) -> list[str]:
    common = f"--held-out 2 --max-len 24 -O batch_size=4 -O max_steps={steps} -O judge_every=2 -O save_every=2 -O bf16=false"
    more = DRAFT if kind == "pretrain" else "-O num_depths=2 -O draft_vocab_size=256"
    return ["train", kind, "--data", str(data), "--out", str(out), "--device", "cpu", *common.split(), *more.split()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of one length: the mean of two processes' means is then the mean of all."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"tokens": [5 + (i * i * j) % 4000 for j in range(24)]}) + "\n" for i in range(1, 11)))
    return path


def forked(command: list[str], folder: Path) -> str:
    """What two processes print that are forks of this one: nothing is imported again. As torchrun's do, they meet at a store of
    the process that starts them, so the port is taken before anybody is told of it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=_be_rank, args=(rank, store.port, command, folder / f"printed{rank}")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    printed = "".join((folder / f"printed{rank}").read_text() for rank in range(2))
    assert [rank.exitcode for rank in ranks] == [0, 0], printed[-3000:]
    return printed


def _be_rank(rank: int, port: int, command: list[str], out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with out.open("w") as printed, redirect_stdout(printed), redirect_stderr(printed):
        code = main(command)
    raise SystemExit(code)


def by_torchrun(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "outrider", *command]
    done = subprocess.run(program, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(
    params=[
        pytest.param(forked, marks=pytest.mark.skipif(not can_fork(), reason="this process cannot be forked safely")),
        pytest.param(by_torchrun, marks=pytest.mark.exhaustive),
    ],
    ids=["forked", "torchrun"],
)
def with_two(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    def start(command: list[str]) -> None:
        printed = request.param(command, tmp_path)
        assert printed.count("tokens per pass") == 1  # only the first process speaks

    return start


def weights(out: Path, kind: str) -> dict[str, torch.Tensor]:
    state = torch.load(out / "state.pt", weights_only=True)
    assert state["runs"][kind]["optimizer"]["state"]
    return state["runs"][kind]["module"]


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_either_goes_on(with_two: Start, data: Path, tmp_path: Path) -> None:
    """A draft model: two steps by two processes, two more by one, against four by one."""
    with_two(arguments("pretrain", data, tmp_path / "two", 2))
    assert main(arguments("pretrain", data, tmp_path / "one", 2)) == 0
    assert_same(weights(tmp_path / "one", "pretrain"), weights(tmp_path / "two", "pretrain"))
    saved = load_file(tmp_path / "two" / "pretrain" / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape == (4096, 32) and (tmp_path / "two/pretrain/tokenizer.json").is_file()
    for folder in ("one", "two"):
        assert main(arguments("pretrain", data, tmp_path / folder, 4)) == 0
    assert_same(weights(tmp_path / "one", "pretrain"), weights(tmp_path / "two", "pretrain"))


@pytest.mark.slow
def test_heads_are_divided_too(with_two: Start, data: Path, tmp_path: Path) -> None:
    """Frozen parts, parts that are called from outside, and in ``make test-all`` a run of two that two resume."""
    steps = [2 * (count + 1) for count in repeats(1, of=2)]
    for num_steps in steps:
        with_two(arguments("eagle3", data, tmp_path / "two", num_steps))
    assert main(arguments("eagle3", data, tmp_path / "one", steps[-1])) == 0
    assert_same(weights(tmp_path / "one", "eagle3"), weights(tmp_path / "two", "eagle3"))
    notes = json.loads((tmp_path / "two" / "eagle3" / "provenance.json").read_text())
    assert (
        notes["target"]["layers"] == json.loads((Path(bundled_path("target")) / "config.json").read_text())["num_hidden_layers"]
    )
