"""Several models in one server, and LoRA adapters as models: each answers as it does alone."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from outrider import LLM, SamplingParams  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.cli.main import main  # noqa: E402
from outrider.cli.parsers.serve import add_parser  # noqa: E402
from outrider.cli.serve_models import Named, load_all  # noqa: E402
from outrider.core.errors import OptionError  # noqa: E402
from outrider.server.app import create_app  # noqa: E402
from outrider.server.models import Models  # noqa: E402
from outrider.server.service import Service  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

_TARGET = bundled_path("target")


def small_adapter(folder: Path) -> Path:
    """An adapter of the bundled target that says something else."""
    torch.manual_seed(1)
    size = json.loads((Path(_TARGET) / "config.json").read_text())["hidden_size"]
    name = "base_model.model.model.layers.1.self_attn.o_proj"
    tensors = {f"{name}.lora_A.weight": torch.randn(4, size), f"{name}.lora_B.weight": 0.03 * torch.randn(size, 4)}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _loaded(*flags: str, kept: ExitStack) -> list[Any]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return load_all(parser.parse_args(["serve", *flags]), kept)


def test_each_model_answers_as_it_does_alone(tmp_path: Path) -> None:
    adapter = small_adapter(tmp_path / "adapter")
    with ExitStack() as kept:
        flags = [
            "--model",
            f"big={_TARGET}",
            "--model",
            f"small={bundled_path('draft')}",
            "--draft",
            f"big={bundled_path('draft')}",
        ]
        loaded = _loaded(*flags, "--adapter", f"tuned={adapter}", kept=kept)
        assert [one.llm.method_name for one in loaded] == ["draft-model", "prompt-lookup", "draft-model"]
        services = [Service(one.llm, ServerSettings(), name=one.name, parent=one.parent) for one in loaded]
        asyncio.run(_compare(services))


async def _compare(services: list[Service]) -> None:
    app = create_app(services[0], others=services[1:])
    for service in services:
        service.worker.start()
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in listed] == [("big", None), ("small", None), ("tuned", "big")]
            body = {"prompt": "The ship sank and", "max_tokens": 40, "temperature": 1, "seed": 3, "ignore_eos": True}
            asked = [client.post("/v1/completions", json={**body, "model": service.name}) for service in services]
            texts = []
            for service, answer in zip(services, await asyncio.gather(*asked), strict=True):
                assert answer.json()["model"] == service.name
                texts.append(answer.json()["choices"][0]["text"])
                assert texts[-1] == service.llm.generate(["The ship sank and"], params, method="plain")[0].text
            assert len(set(texts)) == 3, "three models say three things"
            wrong = await client.post("/v1/completions", json={**body, "model": "bigg"})
            assert wrong.status_code == 404 and "'big'" in wrong.text
            tokens = {}
            for family in text_string_to_metric_families((await client.get("/metrics")).text):
                for sample in family.samples:
                    if sample.name == "outrider:generation_tokens_total":
                        tokens[sample.labels["model"]] = sample.value
            assert tokens == {"big": 40, "small": 40, "tuned": 40}
            assert (await client.get("/health")).json() == {"status": "ok", "requests": 0}
            shown = (await client.get("/v1/speculation", params={"model": "small"})).json()
            assert shown["model"] == "small" and shown["models"] == ["big", "small", "tuned"]
    finally:
        for service in services:
            service.close()


def test_names_are_read_and_checked(tmp_path: Path) -> None:
    assert Named.of("a=b/c") == Named("a", "b/c") and Named.of("org/model") == Named(None, "org/model")
    odd = tmp_path / "x=y"
    odd.mkdir()
    assert Named.of(str(odd)) == Named(None, str(odd)), "a folder that exists is no name"
    with ExitStack() as kept:
        with pytest.raises(OptionError, match="no model is called 'bg'"):
            _loaded("--model", f"big={_TARGET}", "--draft", f"bg={_TARGET}", kept=kept)
        with pytest.raises(OptionError, match="NAME=FOLDER"):
            _loaded("--adapter", str(tmp_path), kept=kept)
        with pytest.raises(OptionError, match="--name is for one model"):
            _loaded("--name", "x", "--model", f"a={_TARGET}", "--model", f"b={_TARGET}", kept=kept)


def test_two_models_of_one_name_are_refused() -> None:
    llm = LLM(method="plain")
    services = [Service(llm, ServerSettings(), name="same") for _ in range(2)]
    with pytest.raises(OptionError, match="one name"):
        Models(services)
    for service in services:
        service.intake.close()


def test_serve_tells_what_is_wrong_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--adapter", f"x={tmp_path}"]) != 0
    assert "adapter_model.safetensors" in capsys.readouterr().err
