"""/v1/embeddings: the numbers transformers gives, the refusals, and that nobody is disturbed."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import bystander, run

from outrider import LLM
from outrider.bundled import bundled_path
from outrider.server.embeddings import Pooling, declared_pooling
from outrider.server.service import Service

_TEXTS = ["Once upon a time, there was a cat.", "The dog ran. " * 40]


def _reference(text: str, kind: str) -> torch.Tensor:
    """States of transformers' own modules, pooled by the definition."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(bundled_path("target"), dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(bundled_path("target"))(text, return_tensors="pt").input_ids
    with torch.no_grad():
        states = model(ids).last_hidden_state[0]
    pooled = states.mean(0) if kind == "mean" else states[-1]
    return pooled / pooled.norm()


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_are_those_of_transformers(kind: str) -> None:
    async def work(service: Service, client: Any) -> None:
        answer = (await client.post("/v1/embeddings", json={"input": _TEXTS, "pooling": kind})).json()
        assert [entry["index"] for entry in answer["data"]] == [0, 1]
        for entry, text in zip(answer["data"], _TEXTS, strict=True):
            vector = torch.tensor(entry["embedding"])
            assert float(vector.norm()) == pytest.approx(1, abs=1e-4)
            assert float(vector @ _reference(text, kind)) > 0.999
        packed = (
            await client.post("/v1/embeddings", json={"input": _TEXTS, "pooling": kind, "encoding_format": "base64"})
        ).json()
        raw = torch.frombuffer(bytearray(base64.b64decode(packed["data"][0]["embedding"])), dtype=torch.float32)
        torch.testing.assert_close(raw, torch.tensor(answer["data"][0]["embedding"]), atol=1e-6, rtol=1e-5)

    run(work)


def test_a_model_not_made_for_it_is_refused_unless_asked(tmp_path: Path) -> None:
    async def refused(service: Service, client: Any) -> None:
        answer = await client.post("/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 400 and "not made for embeddings" in answer.text
        assert (await client.post("/v1/embeddings", json={"input": "a", "pooling": "mean"})).status_code == 200

    run(refused)
    folder = tmp_path / "model"
    shutil.copytree(bundled_path("target"), folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    assert declared_pooling(folder) == Pooling("last", is_normalised=False)

    async def taken(service: Service, client: Any) -> None:
        vector = torch.tensor((await client.post("/v1/embeddings", json={"input": "a"})).json()["data"][0]["embedding"])
        unit = (await client.post("/v1/embeddings", json={"input": "a", "pooling": "last"})).json()["data"][0]["embedding"]
        assert float(vector.norm()) > 1.5, "the checkpoint does not normalise"
        torch.testing.assert_close(torch.tensor(unit), vector)

    run(taken, llm=LLM(str(folder), method="plain"))


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": ""},
        {"input": ["a", ""]},
        {"input": [999_999]},
        {"input": "a", "dimensions": 7},
        {"input": "a", "dimensions": 100_000},
        {"input": [1] * 100_000},
        {"input": ["a"] * 3000},
        {"input": {"a": 1}},
        {"input": "a", "encoding_format": "hex"},
    ],
)
def test_bad_requests_are_refused(body: dict[str, Any]) -> None:
    async def work(service: Service, client: Any) -> None:
        answer = await client.post("/v1/embeddings", json={"pooling": "mean", **body})
        assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text

    run(work)


def test_texts_beside_it_stay_the_same_and_tokens_are_counted() -> None:
    async def work(service: Service, client: Any) -> None:
        alone = await bystander(client)
        many = client.post("/v1/embeddings", json={"input": _TEXTS * 4, "pooling": "mean"})
        beside, answer = await asyncio.gather(bystander(client), many)
        assert beside == alone
        assert answer.json()["usage"]["prompt_tokens"] == answer.json()["usage"]["total_tokens"] > 400
        assert service.num_active == 0

    run(work)


def test_an_errand_that_fails_ends_alone() -> None:
    def broken() -> Generator[None, None, None]:
        yield
        raise RuntimeError("a defect")

    async def work(service: Service, client: Any) -> None:
        alone = await bystander(client)
        failing = asyncio.ensure_future(service.worker.run_errand(broken()))
        beside = await bystander(client)
        with pytest.raises(Exception, match="RuntimeError"):
            await failing
        assert beside == alone and service.worker.num_failures == 0

    run(work)
