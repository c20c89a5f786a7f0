"""Training text in the target's own words: its answers to the prompts of a corpus, written with our own engine.

A drafter has to predict the target, so it learns most from the target's own text (SpecForge, speculators and EAGLE-3 all train
on regenerated answers). Speculation makes the writing faster and, being lossless, does not change it. All prompts are one
queue, so that the device is full until the last of them. The file grows in the order of the prompts, and a killed run continues
after its last whole line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.core.request import RequestState
from outrider.train.data import Document


def prompts_of(documents: Sequence[Document], *, prompt_len: int) -> list[tuple[int, ...]]:
    """The target's prompts: a conversation up to its first answer, or the beginning of a text."""
    return [document.tokens[: document.begin or prompt_len] for document in documents]


def regenerate(llm: LLM, prompts: Sequence[Sequence[int]], out: Path, *, params: SamplingParams) -> Iterator[int]:
    """Write ``{"tokens", "prompt_len"}`` lines. Yields their number whenever it grows."""
    num_lines = first = _whole_lines(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    each = [seeded(params, number) for number in range(first, len(prompts))]
    requests, ended = llm.requests([list(prompt) for prompt in prompts[first:]], each), dict[int, RequestState]()
    with out.open("a", encoding="utf-8") as file:
        for step in llm.steps(requests):
            if not step.state.is_finished:
                continue
            ended[first + step.request] = step.state
            while num_lines in ended:
                state = ended.pop(num_lines)
                file.write(json.dumps({"tokens": state.tokens, "prompt_len": len(state.request.prompt_ids)}) + "\n")
                num_lines += 1
            file.flush()
            yield num_lines


def regenerated(llm: LLM, prompts: Sequence[list[int]], each: Sequence[SamplingParams]) -> list[dict[str, Any]]:
    """The lines of some prompts."""
    return [
        {"tokens": [*prompt, *output.token_ids], "prompt_len": len(prompt)}
        for prompt, output in zip(prompts, llm.generate(list(prompts), list(each)), strict=True)
    ]


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    """Parameters with a seed for each prompt, however the run is split."""
    return replace(params, seed=(params.seed or 0) * 1_000_003 + number)


def _whole_lines(out: Path) -> int:
    """Number of complete lines of an earlier run; an incomplete one is cut off."""
    if not out.is_file():
        return 0
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        out.write_bytes(whole)
    if whole and not whole.lstrip().startswith(b'{"tokens"'):
        raise OptionError(f"{out} does not hold regenerated text; use another --out")
    return whole.count(b"\n")
