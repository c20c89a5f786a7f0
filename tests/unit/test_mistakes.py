"""Mistakes in Python calls: ours, in one line, with the nearest valid name, and before anything is loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider.api
from outrider import LLM, CompositionError, ModelError, OptionError, RequestError, SamplingParams
from outrider.bundled import bundled_path

TARGET, DRAFT = bundled_path("target"), bundled_path("draft")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="plain", dtype="float32")


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the mistake was found")

    monkeypatch.setattr(outrider.api, "load_model", refuse)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"method": "draft-model"}, CompositionError, ("needs a draft model", "prompt-lookup")),
        ({"method": "draft-modle", "draft": DRAFT}, OptionError, ("did you mean 'draft-model'",)),
        ({"method": "prompt-lookup", "max_ngrm": 3}, OptionError, ("did you mean 'max_ngram'",)),
        ({"metod": "plain"}, OptionError, ("has no option 'metod'", "did you mean 'method'")),
        ({"method": "eagle3", "heads": "x", "ends": "y"}, OptionError, ("it is called 'target_folder' now",)),
        ({"method": "plain", "devise": "cpu"}, OptionError, ("did you mean 'device'",)),
        ({"method": "suffix", "acceptance": "blok"}, OptionError, ("did you mean 'block'",)),
        ({"method": "suffix", "acceptance": "block"}, CompositionError, ("SuffixDecoding", "Block", "coupled")),
        ({"method": "suffix", "policy": "adaptiv"}, OptionError, ("did you mean 'adaptive'",)),
        ({"method": "draft-model", "draft": "/no/such/folder"}, ModelError, ("no such folder",)),
        ({"method": "rest"}, CompositionError, ("needs the option 'datastore'",)),
        ({"method": "eagle3"}, CompositionError, ("needs the option 'heads'",)),
        ({"method": "draft-model", "draft": DRAFT, "acceptance": "judge"}, CompositionError, ("needs the option 'judge'",)),
        ({"method": "plain", "revision": "main"}, OptionError, ("revision", "on this machine")),
    ],
)
def test_a_wrong_constructor_call_loads_nothing(tmp_path: Path, options: dict[str, Any], kind: type, words: tuple) -> None:
    shutil.copytree(TARGET, tmp_path / "model")
    with pytest.raises(kind) as caught:
        LLM(tmp_path / "model", **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("nothing_loads")
def test_a_model_is_named() -> None:
    with pytest.raises(OptionError, match="17 is not the name of a model"):
        LLM(17)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, ("prompts = None", "give a string")),
        (17, ("prompts = 17",)),
        ({"prompt": "hi"}, ("prompts is a dict", "give a string")),
        ({"role": "user", "content": "hi"}, ("dict", "chat()")),
        ([None], ("prompt 0 = None",)),
        (["hi", {"role": "user", "content": "hi"}], ("prompt 1 is a dict", "chat()")),
        (["hi", 5], ("prompt 1 = 5",)),
        ([5, "hi"], ("holds 'hi'", "token id")),
        ([[5, None]], ("prompt 0 holds None",)),
        ([True], ("prompt 0 = True",)),
        ([], ("no prompts",)),
        (b"hi", ("is not valid",)),
    ],
)
def test_prompts_of_the_wrong_kind(llm: LLM, prompts: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts)
    for word in words:
        assert word in str(caught.value)


def test_an_array_is_told_how_to_become_a_list(llm: LLM) -> None:
    import torch

    with pytest.raises(RequestError, match="tolist"):
        llm.generate(torch.tensor([5, 6]))  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "hi"}, [], ["hi"], [{"role": "user"}], [[]]])
def test_messages_of_the_wrong_kind(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_token": 4}, ("unknown sampling parameter 'max_token'", "did you mean 'max_tokens'")),
        ({"temprature": 1}, ("did you mean 'temperature'",)),
        ({"stop": 5}, ("stop = 5",)),
        ({"stop": [5]}, ("stop holds 5", "stop_token_ids")),
        ({"stop": [""]}, ("empty string",)),
        ({"stop_token_ids": ["a"]}, ("stop_token_ids holds 'a'",)),
        ({"banned_token_ids": 7}, ("banned_token_ids = 7",)),
        ({"logit_bias": [1]}, ("logit_bias = [1]", "dict")),
        ({"logit_bias": {"x": 1}}, ("logit_bias is not valid",)),
        ({"seed": "x"}, ("seed = 'x'",)),
        ({"logprobs": 1.5}, ("logprobs = 1.5",)),
        ({"max_tokens": "4"}, ("max_tokens = '4'",)),
        ({"temperature": None}, ("temperature = None",)),
    ],
)
def test_wrong_sampling_parameters(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    for word in words:
        assert word in str(caught.value)


def test_none_is_no_list() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, banned_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert replace(params, stop="end").stop == ("end",)


@pytest.mark.parametrize("params", [{"max_tokens": 4}, "greedy", 5, [{"max_tokens": 4}]])
def test_parameters_are_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("hi", params)


def test_a_missing_draft_is_found_before_loading_on_the_command_line(nothing_loads, tmp_path: Path, capsys) -> None:
    from outrider.cli.main import main

    shutil.copytree(TARGET, tmp_path / "model")
    for more in (("--method", "draft-model"), ("-O", "max_ngrm=3"), ("--draft", "/no/such")):
        assert main(["generate", "hi", "--model", str(tmp_path / "model"), *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1
