"""Jobs in shards: what was written stays, what is missing is written, and pieces make the same file as one go."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.core.errors import OptionError
from outrider.offline.shards import Numbered, Shards, Writer, finished, run_here

PROMPTS = [f"Story {number}" for number in range(23)]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'outrider[ray]')"
)


class Failing:
    """A writer that dies after so many shards."""

    def __init__(self, most: int) -> None:
        self.left, self.seen = most, list[int]()

    def open(self) -> Writer:
        return self

    def __call__(self, prompts: Numbered) -> list[dict[str, Any]]:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.seen += [number for number, _ in prompts]
        return [{"number": number, "text": f"{prompt} ends."} for number, prompt in prompts]


def test_a_killed_job_goes_on_and_no_prompt_is_written_twice(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first, second = Failing(2), Failing(99)
    shards = Shards.beside(out, PROMPTS, {"model": "a"}, size=5)
    with pytest.raises(KeyboardInterrupt):
        finished(shards, out, run_here(shards, first.open), lambda _: None)
    assert not out.exists() and shards.missing() == [2, 3, 4]
    told: list[int] = []
    again = Shards.beside(out, PROMPTS, {"model": "a"}, size=5)
    assert finished(again, out, run_here(again, second.open), told.append) == 23
    assert told == [10, 15, 20, 23]
    assert first.seen + second.seen == list(range(23))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"number": number, "text": f"Story {number} ends."} for number in range(23)]
    assert list(tmp_path.iterdir()) == [out], "shards are removed when the file is whole"


def test_a_shard_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    shards = Shards.beside(out, PROMPTS, {}, size=10)
    (shards.folder / "shard-000001.4711.part").write_text('{"number": 10')
    assert shards.missing() == [0, 1, 2]
    finished(shards, out, run_here(shards, Failing(99).open), lambda _: None)
    assert len(out.read_text().splitlines()) == 23 and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("prompts", "model", "what"), [(PROMPTS[1:], "a", "prompts"), (PROMPTS, "b", "model")])
def test_the_shards_of_another_job_are_refused(tmp_path: Path, prompts: list[str], model: str, what: str) -> None:
    out = tmp_path / "answers.jsonl"
    Shards.beside(out, PROMPTS, {"model": "a"}, size=5)
    with pytest.raises(OptionError, match=f"shards of another job .its {what} was"):
        Shards.beside(out, prompts, {"model": model}, size=5)


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "--ray"]) == 2
    assert "--out FILE" in capsys.readouterr().err
    assert main(["generate", "Hello", "--ray", "--out", str(tmp_path / "a.jsonl"), "--num-beams", "2"]) == 2
    assert "--num-beams" in capsys.readouterr().err


@needs_ray
@pytest.mark.slow
def test_a_job_on_ray_is_killed_and_writes_what_one_process_does(tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join(PROMPTS))
    common = ["--file", str(source), "--lines", "--max-tokens", "16", "--temperature", "0.8", "--seed", "3"]
    command = [sys.executable, "-m", "outrider", "generate", *common, "--ray", "--out", str(out), "--shard-size", "2"]
    shards = out.with_name("answers.jsonl.shards")
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while job.poll() is None and len(list(shards.glob("shard-*.jsonl"))) < 3:
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL and not out.exists(), "killed in the middle"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    one = subprocess.run(
        [sys.executable, "-m", "outrider", "generate", *common, "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    assert [line["text"] for line in lines] == [answer["text"] for answer in json.loads(one.stdout)]
    assert [line["number"] for line in lines] == list(range(23))
