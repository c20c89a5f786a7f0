"""A job cut into shards, each a file that is written whole or not at all.

A shard holds the lines of a few prompts. It gets its name in one atomic step, so every shard that exists is complete. A killed
job is resumed with the missing shards. Every line depends only on its prompt, its number and the job's settings, so a resumed
job writes the same lines as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from outrider.core.errors import OptionError

Prompt = str | list[int]
Numbered = Sequence[tuple[int, Prompt]]
"""Prompts, each with its number in the job."""
Writer = Callable[[Numbered], list[dict[str, Any]]]
"""Writes a line for every prompt."""
OpenWriter = Callable[[], Writer]
"""Makes a writer in the worker process, where it loads the model."""


@final
@dataclass(frozen=True)
class Shards:
    """The folder of a batch job."""

    folder: Path
    prompts: Sequence[Prompt]
    settings: dict[str, Any]
    """Settings on which the answers depend, beside the prompts. A folder with other settings is refused."""
    size: int = 32
    """Number of prompts in a shard."""

    @staticmethod
    def beside(out: Path, prompts: Sequence[Prompt], settings: dict[str, Any], *, size: int = 32) -> Shards:
        """The folder ``OUT.shards`` of a job that writes ``out``. It is created, or found from an earlier run."""
        shards = Shards(out.with_name(out.name + ".shards"), prompts, settings, size)
        shards.folder.mkdir(parents=True, exist_ok=True)
        shards._check()
        return shards

    def __len__(self) -> int:
        return math.ceil(len(self.prompts) / self.size)

    def missing(self) -> list[int]:
        """Shards that have not been written yet."""
        return [number for number in range(len(self)) if not self._file(number).exists()]

    def task(self, number: int) -> list[tuple[int, Prompt]]:
        """The prompts of a shard."""
        begin = number * self.size
        return list(enumerate(self.prompts[begin : begin + self.size], begin))

    def write(self, number: int, lines: Sequence[dict[str, Any]]) -> None:
        write_shard(self.folder, number, lines)

    def merge(self, out: Path) -> int:
        """Merge all lines into one file, in the order of their prompts, and remove the folder. Returns the number of lines."""
        left = self.missing()
        assert not left, f"shards {left} are missing"
        part = out.with_name(out.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            for number in range(len(self)):
                file.write(self._file(number).read_text(encoding="utf-8"))
        os.replace(part, out)
        for path in [*self.folder.glob("shard-*"), self.folder / "job.json"]:
            path.unlink()
        self.folder.rmdir()
        return len(self.prompts)

    def _file(self, number: int) -> Path:
        return _name(self.folder, number)

    def _check(self) -> None:
        """Write a note that identifies the job, or compare with an existing note."""
        note, mine = self.folder / "job.json", self._note()
        if not note.exists():
            part = note.with_suffix(".part")
            part.write_text(json.dumps(mine), encoding="utf-8")
            os.replace(part, note)
            return
        found = json.loads(note.read_text(encoding="utf-8"))
        other = [name for name in mine if found.get(name) != mine[name]]
        if other:
            raise OptionError(
                f"{self.folder} holds the shards of another job (its {other[0]} was {found.get(other[0])!r}, now "
                f"{mine[other[0]]!r}); remove the folder, or use another --out"
            )

    def _note(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(list(self.prompts)).encode()).hexdigest()[:16]
        return {"prompts": digest, "shard_size": self.size, **json.loads(json.dumps(self.settings))}


def write_shard(folder: Path, number: int, lines: Sequence[dict[str, Any]]) -> None:
    """Write a shard's file in one atomic step. Two processes that write the same shard write the same lines."""
    name = _name(folder, number)
    part = name.with_suffix(f".{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, name)


def _name(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.jsonl"


def run_here(shards: Shards, open_writer: OpenWriter) -> Iterator[int]:
    """Write the missing shards in this process, one after the other. Yields the number of each shard that is done."""
    left = shards.missing()
    writer = open_writer() if left else None
    for number in left:
        assert writer is not None
        shards.write(number, writer(shards.task(number)))
        yield number


def finished(shards: Shards, out: Path, done: Iterable[int], told: Callable[[int], None]) -> int:
    """Wait until every shard is done, reporting the number of finished prompts. Then merge the shards, and return the number of
    lines."""
    count = len(shards) - len(shards.missing())
    told(min(count * shards.size, len(shards.prompts)))
    for _ in done:
        count += 1
        told(min(count * shards.size, len(shards.prompts)))
    return shards.merge(out)
