"""``outrider serve --learn``, whole: a spoilt draft learns from what is served, takes its place, and no text changes."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from outrider import LLM  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.models.load import load_model  # noqa: E402
from outrider.server.app import create_app  # noqa: E402
from outrider.server.service import Service  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402
from outrider.train.draft_lm import DraftLM  # noqa: E402
from outrider.train.online import OnlineDraft, OnlineSettings  # noqa: E402

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
@pytest.mark.parametrize("options", [{"num_draft_tokens": 3}, {}], ids=["fixed", "adaptive"])
def test_a_spoilt_draft_recovers_while_it_serves(tmp_path: Path, options: dict[str, int]) -> None:
    """Under the default policy too, which hardly drafts with it: what is decoded without a draft is learnt from as well."""
    spoilt = spoilt_draft(tmp_path / "draft")
    llm = LLM(draft=spoilt, **options)
    settings = OnlineSettings(background=True, update_every=128, num_steps=12, learning_rate=1e-3, warmup_steps=2, average=0.7)
    target = load_model(bundled_path("target"), fast=False)
    learner = OnlineDraft(DraftLM.load(spoilt, target.device), target, settings, dtype=llm.drafts[0].dtype)
    service = Service(llm, ServerSettings(), learner=learner)

    async def ask(client: Any, seed: int, speculation: str) -> dict[str, Any]:
        body = {"prompt": _BEGINNINGS[seed % 6], "max_tokens": 40, "seed": seed, "temperature": 0.7, "ignore_eos": True}
        answer = await client.post("/v1/completions", json={**body, "speculation": speculation})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def work() -> None:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            answers, num_swaps = [], 0.0
            for wave in range(40):
                seeds = range(8 * wave, 8 * wave + 8)
                answers += await asyncio.gather(*(ask(client, seed, "auto") for seed in seeds))
                found = re.search(r"^outrider:draft_swaps_total (\S+)", (await client.get("/metrics")).text, re.MULTILINE)
                num_swaps = float(found[1]) if found else 0.0
                if num_swaps >= 2:
                    break
            assert num_swaps >= 1 and service.worker.lessons.is_on, learner.judgements
            for seed in (0, len(answers) // 2, len(answers) - 1):
                alone = await ask(client, seed, "off")
                assert alone["choices"][0]["text"] == answers[seed]["choices"][0]["text"]

    service.worker.start()
    try:
        asyncio.run(work())
    finally:
        service.worker.stop()
    swapped = [judgement for judgement in learner.judgements if judgement.swapped]
    assert swapped[-1].learned > learner.judgements[0].served + 0.05, learner.judgements
