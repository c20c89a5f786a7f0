"""``outrider serve --learn``: drafts and heads learn from what is served, better ones take their place, and no text changes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import until
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from outrider import LLM, SamplingParams  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.cli.serve_learning import taught  # noqa: E402
from outrider.core.errors import OptionError  # noqa: E402
from outrider.core.request import Origin, RequestState  # noqa: E402
from outrider.engine.job import Job  # noqa: E402
from outrider.engine.replace_drafter import Learner  # noqa: E402
from outrider.engine.scheduler import Scheduler  # noqa: E402
from outrider.models.heads import Head, load_head  # noqa: E402
from outrider.models.load import load_model  # noqa: E402
from outrider.server.app import create_app  # noqa: E402
from outrider.server.service import Service  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402
from outrider.train.draft_lm import DraftLM  # noqa: E402
from outrider.train.online import OnlineSettings, online_draft  # noqa: E402

_BEGINNINGS = ("Once upon a time", "One day, a girl", "Tom and his dog", "The old man", "Lily liked to", "There was a big")


def spoilt_draft(folder: Path) -> str:
    """The bundled draft with noise on its matrices."""
    shutil.copytree(bundled_path("draft"), folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = (tensor + 0.6 * tensor.float().std() * torch.randn(tensor.shape)).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({"num_draft_tokens": 3}, marks=pytest.mark.exhaustive, id="fixed"), pytest.param({}, id="adaptive")],
)
def test_a_spoilt_draft_recovers_while_it_serves(tmp_path: Path, options: dict[str, int]) -> None:
    """Under the default policy too, which hardly drafts with it: what is decoded without a draft is learnt from as well."""
    spoilt = spoilt_draft(tmp_path / "draft")
    llm = LLM(draft=spoilt, **options)
    steps = {"update_every": 128, "num_steps": 12, "learning_rate": 1e-3, "warmup_steps": 2, "average": 0.7}
    settings = OnlineSettings(background=True, busy_share=1.0, **steps)  # all the time it wants: nothing depends on speed
    target = load_model(bundled_path("target"), fast=False)
    learner = online_draft(DraftLM.load(spoilt, target.device), target, settings, dtype=llm.drafts[0].dtype)
    service = Service(llm, ServerSettings(), learner=learner)

    async def ask(client: Any, seed: int, speculation: str) -> dict[str, Any]:
        body = {"prompt": _BEGINNINGS[seed % 6], "max_tokens": 40, "seed": seed, "temperature": 0.7, "ignore_eos": True}
        answer = await client.post("/v1/completions", json={**body, "speculation": speculation})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def has_recovered() -> bool:
        return any(one.swapped and one.learned > learner.judgements[0].served + 0.05 for one in tuple(learner.judgements))

    def draft_swaps() -> float:
        (family,) = service.metrics.draft_swaps.collect()
        return family.samples[0].value

    async def work() -> None:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            answers = []
            for wave in range(40):
                seeds = range(8 * wave, 8 * wave + 8)
                answers += await asyncio.gather(*(ask(client, seed, "auto") for seed in seeds))
                await until(lambda: not learner.is_learning)  # so that a slow machine learns from as many requests
                if has_recovered():
                    break
            assert has_recovered() and service.worker.learner.is_on, learner.judgements
            await until(lambda: draft_swaps() >= 1)  # the engine swaps after the judgement, in a round of its own
            for seed in (0, len(answers) // 2, len(answers) - 1):
                alone = await ask(client, seed, "off")
                assert alone["choices"][0]["text"] == answers[seed]["choices"][0]["text"]

    service.worker.start()
    try:
        asyncio.run(work())
    finally:
        service.worker.stop()


class _HeadPupil(Learner):
    """Has other heads after every few requests: those of the folder with noise."""

    def __init__(self) -> None:
        self.num_ended, self.num_given, self.was_idle = 0, 0, set[bool]()

    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        assert prompt_ids and len(token_ids) == len(origins)
        self.num_ended += 1

    def maybe_update(self, *, is_idle: bool = True) -> Head | None:
        self.was_idle.add(is_idle)
        if self.num_ended < 2 * (self.num_given + 1):
            return None
        self.num_given += 1
        head = load_head(bundled_path("heads/eagle3"))
        torch.manual_seed(self.num_given)
        head.fc.weight.data += 0.02 * torch.randn_like(head.fc.weight)  # pyright: ignore[reportAttributeAccessIssue]
        return head

    def close(self) -> None:
        """Nothing runs beside it."""


def test_heads_are_exchanged_under_load_and_no_text_changes() -> None:
    """Running requests read themselves again, for the new heads have not seen the target's states of their tokens."""
    llm, pupil = LLM(method="eagle3"), _HeadPupil()
    service = Service(llm, ServerSettings(), learner=pupil, install=llm.replace_heads)
    ways: list[Any] = ["auto", {"num_draft_tokens": 3}, {"method": "medusa"}, "off"]

    async def ask(client: Any, number: int, speculation: Any) -> str:
        body = {"prompt": _BEGINNINGS[number % 6], "max_tokens": 8 + number, "seed": number, "temperature": 1}
        answer = await client.post("/v1/completions", json={**body, "ignore_eos": True, "speculation": speculation})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def work() -> None:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            texts = await asyncio.gather(*(ask(client, number, ways[number % 4]) for number in range(12)))
            assert texts == await asyncio.gather(*(ask(client, number, "off") for number in range(12)))
            await until(lambda: pupil.was_idle == {True, False} and pupil.num_given >= 6)

    service.worker.start()
    try:
        asyncio.run(work())
    finally:
        service.close()
    assert service.worker.num_failures == 0 and service.worker.learner.is_on
    assert pupil.num_given >= 6 and pupil.was_idle == {True, False} and llm.heads_name is None


@pytest.mark.parametrize("method, max_draft", [("ngram-cache", 0), ("suffix", 0), ("token-recycling", None)])
def test_memories_learn_across_requests(method: str, max_draft: int | None) -> None:
    """What one request said is guessed for the next. N-grams and suffixes are learned from requests without guesses too."""
    llm = LLM(method=method, num_draft_tokens=6)
    scheduler = Scheduler(llm.target, lambda _: llm.method)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)

    def served(number: int, max_draft: int | None) -> RequestState:
        state = RequestState.of(llm.requests("Once upon a time", params)[0], max_draft=max_draft)
        scheduler.submit(Job(number, state, ""))
        while not scheduler.is_idle:
            scheduler.round()
        return state

    first, again = served(0, max_draft), served(1, None)
    assert first.output_ids == again.output_ids and llm.method.drafter.memories
    assert max_draft is None or first.stats.num_drafted == 0
    assert again.stats.num_passes < 0.75 * first.stats.num_passes


def test_what_is_taught() -> None:
    """A draft model or heads, whichever the method has; memories need no teacher, and the others are refused."""
    settings = OnlineSettings(background=True, busy_share=0.1)
    model = LLM()
    found = taught(model, settings)
    assert found is not None and found.install == model.replace_draft
    found.learner.close()
    headed = LLM(method="eagle3")
    found = taught(headed, settings)
    assert found is not None and found.install == headed.replace_heads
    found.learner.close()
    assert taught(LLM(method="suffix"), settings) is None
    with pytest.raises(OptionError, match="nothing to train: method 'prompt-lookup'"):
        taught(LLM(method="prompt-lookup"), settings)
    with pytest.raises(OptionError, match="eagle3 heads cannot draft for method 'draft-model'"):
        model.replace_heads(load_head(bundled_path("heads/eagle3")))
