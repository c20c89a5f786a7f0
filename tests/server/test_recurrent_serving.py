"""A model with recurrent layers behind the server: requests that come and go, and what it offers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import run

from outrider import LLM
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.models.recurrent.random_model import tiny_raw, write_random

TEXTS = ("Once upon a time", "The little dog ran and ran and ran and ran to the house", "A")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Random weights with the bundled tokenizer."""
    folder, bundled = tmp_path_factory.mktemp("bamba"), Path(bundled_path("target"))
    write_random(folder, tiny_raw("bamba", vocab_size=4096))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, folder / name)
    return LLM(folder, method="token-recycling", device="cpu", dtype="float32", max_batch_size=2, num_draft_tokens=4)


async def texts_of(client: Any, method: str, prompts: tuple[str, ...]) -> list[str]:
    body = {"max_tokens": 16, "temperature": 0.7, "seed": 3, "ignore_eos": True, "speculation": {"method": method}}
    answers = await asyncio.gather(*(client.post("/v1/completions", json={**body, "prompt": p}) for p in prompts))
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_requests_share_passes_and_get_their_own_texts(llm: LLM) -> None:
    async def work(service: Any, client: Any) -> None:
        expected = [(await texts_of(client, "plain", (text,)))[0] for text in TEXTS]
        assert await texts_of(client, "token-recycling", TEXTS) == expected
        assert await texts_of(client, "suffix", (TEXTS[1],)) == expected[1:2], "a prompt that was read before"

    run(work, llm=llm)


def test_it_offers_only_methods_that_it_can_run(llm: LLM) -> None:
    async def work(service: Any, client: Any) -> None:
        offered = (await client.get("/v1/speculation")).json()["methods"]
        assert "lookahead" in offered and not {"early-exit", "swift", "del", "draft-verify"} & set(offered)

    run(work, llm=llm)


def test_a_memory_budget_is_refused(llm: LLM) -> None:
    async def work(service: Any, client: Any) -> None:
        raise AssertionError("the server started")

    with pytest.raises(OptionError, match="with a known cache size"):
        run(work, llm=llm, memory_budget=1 << 30)
