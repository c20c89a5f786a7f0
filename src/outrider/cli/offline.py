"""``--ray`` of ``outrider generate`` and ``outrider train regenerate``: many prompts on Ray Data, in a job that can be
resumed."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from tqdm import tqdm

from outrider.api import LLM
from outrider.cli.options import load_llm, sampling_of, with_grammar
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.offline.shards import Numbered, OpenWriter, Prompt, Shards, finished
from outrider.train.regenerate import regenerated, seeded


@final
class AnswerWriter:
    """Writes the lines of ``outrider generate``."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._llm = load_llm(arguments, max_batch_size=arguments.batch_size)
        self._params = with_grammar(sampling_of(arguments), self._llm, arguments)
        self._is_chat, self._seed = arguments.chat, arguments.job_seed

    def __call__(self, prompts: Numbered) -> list[dict[str, Any]]:
        encode = self._llm.codec.encode_chat
        asked = [encode([{"role": "user", "content": text}]) if self._is_chat else text for _, text in prompts]
        each = [
            self._params if self._seed is None else replace(self._params, seed=self._seed + number) for number, _ in prompts
        ]
        outputs = self._llm.generate(asked, each)
        return [
            {"number": number, "prompt": text, "text": out.text, "finish_reason": out.finish_reason, "seed": out.seed}
            for (number, text), out in zip(prompts, outputs, strict=True)
        ]


@final
class Regenerated:
    """Writes the lines of ``outrider train regenerate``."""

    def __init__(self, model: str | None, method: str | None, device: str | None, params: SamplingParams) -> None:
        self._llm = LLM(model, method=method, device=device, max_batch_size=32)
        self._params = params

    def __call__(self, prompts: Numbered) -> list[dict[str, Any]]:
        each = [seeded(self._params, number) for number, _ in prompts]
        return regenerated(self._llm, [list(prompt) for _, prompt in prompts], each)  # pyright: ignore[reportArgumentType]


def settings_of(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The arguments on which output lines depend."""
    return {name: str(vars(arguments)[name]) for name in names}


def job_seed(arguments: argparse.Namespace, out: Path) -> int | None:
    """The job's seed, kept for when it is resumed. None if the requests have a seed or nothing is sampled."""
    if arguments.seed is not None or arguments.temperature == 0:
        return None
    note = out.with_name(out.name + ".seed")
    if not note.exists():
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(secrets.randbits(48)), encoding="utf-8")
    return int(note.read_text(encoding="utf-8"))


def run_job(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], open_writer: OpenWriter, out: Path, settings: dict[str, Any]
) -> int:
    """Write ``out`` on Ray; returns the number of lines."""
    try:
        from outrider.offline.ray_data import Workers, run_on_ray
    except ImportError as error:
        raise OptionError(f"--ray needs the package {error.name!r}; pip install 'outrider[ray]'") from None
    workers = Workers(arguments.workers, arguments.worker_gpus, arguments.ray_address)
    if arguments.shard_size < 1:
        raise OptionError(f"--shard-size {arguments.shard_size} is not valid; use at least 1")
    shards = Shards.beside(out, prompts, settings, size=arguments.shard_size)
    with tqdm(total=len(prompts), disable=not sys.stderr.isatty(), unit="prompt") as bar:

        def told(count: int) -> None:
            bar.update(count - bar.n)

        return finished(shards, out, run_on_ray(shards, open_writer, workers), told)
