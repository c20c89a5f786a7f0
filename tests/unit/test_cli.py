"""The command line: what it prints, and that bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from fresh import run_fresh

from outrider.bundled import bundled_path
from outrider.cli.main import main

TARGET, DRAFT = bundled_path("target"), bundled_path("draft")


def outrider(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_prints_the_continuation(capsys) -> None:
    code, out, err = outrider(capsys, "generate", "Once upon a time", "-n", "20")
    assert code == 0 and out.startswith("Once upon a time") and len(out) > 40
    assert "tokens per target pass" in err


def test_generate_json_is_one_document(capsys) -> None:
    code, out, _ = outrider(capsys, "generate", "Once upon a time", "-n", "12", "--json", "--ignore-eos")
    document = json.loads(out)
    assert code == 0 and len(document) == 1
    assert len(document[0]["token_ids"]) == len(document[0]["origins"]) == 12
    assert document[0]["finish_reason"] == "length" and document[0]["stats"]["num_tokens"] == 12


def test_compare_is_identical_and_counts_both(capsys) -> None:
    arguments = ("generate", "One day", "-n", "24", "--compare", "--json", "--dtype", "float32", "-t", "0.8", "--seed", "3")
    code, out, _ = outrider(capsys, *arguments, "-K", "4")  # a fixed length: drafting need not pay on this machine
    document = json.loads(out)
    assert code == 0 and document["identical"]
    assert document["plain"]["outputs"][0]["stats"]["tokens_per_pass"] == 1.0
    assert document["fast"]["outputs"][0]["stats"]["tokens_per_pass"] > 1.0


def test_show_colours_every_token(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = outrider(capsys, "generate", "Once upon a time", "-n", "30", "--show")
    assert "\x1b[32m" in out and "drafted and accepted" in out
    monkeypatch.delenv("FORCE_COLOR")
    _, plain, _ = outrider(capsys, "generate", "Once upon a time", "-n", "30", "--show")
    assert "\x1b[" not in plain


def test_prompts_from_files_and_stdin(capsys, tmp_path, monkeypatch) -> None:
    import io

    path = tmp_path / "prompts.txt"
    path.write_text("Once upon a time\n\nOne day\n")
    code, out, _ = outrider(capsys, "generate", "--file", str(path), "--lines", "-n", "5", "--json")
    assert code == 0 and len(json.loads(out)) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
    code, out, _ = outrider(capsys, "generate", "-n", "5")
    assert code == 0 and out.startswith("Once upon a time")


def test_methods_lists_the_table(capsys) -> None:
    code, out, _ = outrider(capsys, "methods")
    assert code == 0 and "draft-model" in out and "coupled" in out and "fixed" in out
    document = json.loads(outrider(capsys, "methods", "--json")[1])
    assert document["methods"]["plain"]["lossless"] is True


def test_info(capsys) -> None:
    code, out, _ = outrider(capsys, "info", TARGET)
    assert code == 0 and "llama" in out and "4096" in out
    assert json.loads(outrider(capsys, "info", TARGET, "--json")[1])["num_layers"] > 1


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the draft whose weights are cut short."""
    folder = tmp_path_factory.mktemp("draft") / "broken"
    shutil.copytree(DRAFT, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the draft with another vocabulary."""
    folder = tmp_path_factory.mktemp("draft") / "foreign"
    shutil.copytree(DRAFT, folder)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    a, b = [token for token, index in vocab.items() if index in (900, 901)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hi", "--model", "/no/such/folder"), ("no such folder", "give a model folder")),
        (("hi", "--model", "/no/such/file.gguf"), ("no such file",)),
        (("--file", "/no/such/prompt.txt"), ("does not exist",)),
        (("hi", "--model", "{empty}"), ("config.json", "not a model folder")),
        (("hi", "--model", "{file}"), ("is a file",)),
        (("hi", "--draft", "{broken}"), ("damaged or cut short",)),
        (("hi", "--draft", "{foreign}"), ("another vocabulary", "prompt-lookup")),
        (("{long}",), ("context holds", "shorten the prompt")),
        (("",), ()),
        (("hi", "--temperature", "-1"), ("temperature", "0 (greedy)")),
        (("hi", "-K", "0"), ("num_draft_tokens = 0", "at least 1")),
        (("hi", "--method", "draft-modle"), ("unknown method", "did you mean 'draft-model'")),
        (("hi", "--acceptance", "blok"), ("unknown acceptance rule", "did you mean 'block'")),
        (("hi", "--method", "prompt-lookup", "--acceptance", "block"), ("PromptLookup", "Block", "coupled")),
        (("hi", "--dtype", "float31"), ("unknown dtype", "did you mean 'float3")),
        (("hi", "--device", "cuda:99"), ("device",)),
        (("hi", "--device", "quantum"), ("unknown device",)),
        (("hi", "-O", "max_ngrm=3", "--method", "prompt-lookup"), ("did you mean 'max_ngram'",)),
        (("hi", "-O", "nonsense"), ("NAME=VALUE",)),
        (("hi", "--top-p", "1.5"), ("top_p",)),
        (("hi", "--max-tokens", "0"), ("max_tokens",)),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, broken, foreign, arguments, words) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("not a model")
    places = {
        "empty": tmp_path / "empty",
        "file": tmp_path / "file.txt",
        "broken": broken,
        "foreign": foreign,
        "long": "word " * 4000,
    }
    code, out, err = outrider(capsys, "generate", *(argument.format(**places) for argument in arguments))
    if not words:  # an empty prompt starts from the beginning-of-sequence token
        assert code == 0
        return
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("outrider: ")
    for word in words:
        assert word in err


AS_PROCESS = "import runpy, sys\nsys.argv = {words}\nrunpy.run_module('outrider', run_name='__main__')"


def test_no_traceback_from_a_real_process() -> None:
    result = run_fresh(AS_PROCESS.format(words=["outrider", "generate", "hi", "--model", "/no/such/folder"]))
    assert result.returncode == 2 and "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_closed_pipe_is_not_an_error() -> None:
    nobody_reads = "import os\nreading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)\n"
    result = run_fresh(nobody_reads + AS_PROCESS.format(words=["outrider", "methods"]))
    assert result.returncode == 0 and "Traceback" not in result.stderr
