"""Other engines over pipes: the protocol, reasons for their absence, and Hugging Face side by side on the bundled model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.api import LLM
from outrider.bench.peers import worker
from outrider.bench.peers.peer import VARIANTS, Peer, PeerSpec
from outrider.bench.peers.race import PeerLine, Terms, peers_table, race_peers, verdict
from outrider.bench.settings import Setting
from outrider.bench.stats import Estimate
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError

SETTINGS = {"dtype": "float32", "threads": 1, "max_len": 256, "num_draft_tokens": 3, "clock": "process_time"}


def spec(text: str) -> PeerSpec:
    return PeerSpec.of(text, model=bundled_path("target"), draft=bundled_path("draft"))


def test_where_an_engine_lives(monkeypatch) -> None:
    assert spec("hugging-face").python == sys.executable
    assert spec("vllm").python == ""
    monkeypatch.setenv("OUTRIDER_PEER_LLAMA_CPP", "/some/python")
    assert spec("llama-cpp").python == "/some/python"
    given = spec("openvino=/ov/python,model=/ov/target,draft=/ov/draft")
    assert (given.python, given.model, given.draft) == ("/ov/python", "/ov/target", "/ov/draft")
    assert (given.dtype, given.name) == (None, None)
    named = spec("openvino=/ov/python,dtype=bfloat16,threads=2,name=openvino-folder")
    assert named.settings(SETTINGS) == {**SETTINGS, "dtype": "bfloat16", "threads": 2} and given.settings(SETTINGS) == SETTINGS
    assert (named.model, named.dtype, named.name) == (bundled_path("target"), "bfloat16", "openvino-folder")
    with pytest.raises(OptionError, match="did you mean 'dtype'"):
        spec("openvino=/ov/python,type=bfloat16")
    for wrong in ("two", "0", "-1", ""):
        with pytest.raises(OptionError, match=f"threads={wrong} of peer openvino is not valid"):
            spec(f"openvino=/ov/python,threads={wrong}")
    with pytest.raises(OptionError, match="did you mean 'hugging-face'"):
        spec("huggingface")


def test_what_cannot_run_says_why() -> None:
    missing = Peer.open(spec("vllm=/nowhere/python"), "plain", SETTINGS)
    assert isinstance(missing, str) and "cannot be started" in missing
    absent = Peer.open(spec(f"vllm={sys.executable}"), "plain", SETTINGS)
    assert isinstance(absent, str) and "ModuleNotFoundError" in absent
    alone = Peer.open(PeerSpec("hugging-face", sys.executable, bundled_path("target")), "assisted", SETTINGS)
    assert isinstance(alone, str) and "draft" in alone


def test_two_entries_of_an_engine_have_types_and_names_of_their_own(tmp_path: Path) -> None:
    """The worker is a program whose version is the type it was asked for."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\nread job\ntype=${job##*'"dtype": "'}\necho '{"ready": "'${type%%'"'*}'"}'\n""")
    python.chmod(0o755)
    for more, name, dtype in (("", "vllm plain", "float32"), (",dtype=bfloat16,name=halves", "halves plain", "bfloat16")):
        peer = Peer.open(spec(f"vllm={python}{more}"), "plain", SETTINGS)
        assert isinstance(peer, Peer)
        peer.close()
        assert (peer.name, peer.version) == (name, dtype)


def test_what_llama_cpp_was_compiled_for() -> None:
    native = "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 1 | LLAMAFILE = 1 | "
    assert worker.wide_features(native) == "AVX512 AVX512_VNNI AMX_INT8"
    assert worker.wide_features("CPU : AVX2 = 1 | AVX512 = 0 | ") == "compiled for any processor"


def test_a_request_that_fails_is_answered() -> None:
    """In this process: the race below has a worker of its own."""
    job = {"engine": "hugging-face", "variant": "plain", "model": bundled_path("target"), "draft": None, **SETTINGS}
    prompts = ([10, 20, 30], [10**9], [10, 20])
    asked, answers = [job, *({"prompt": prompt, "max_tokens": 5} for prompt in prompts)], list[dict[str, Any]]()
    worker.work(io.StringIO("\n".join(map(json.dumps, asked))), answers.append)
    ready, first, impossible, last = answers
    assert ready["ready"].startswith("transformers")
    assert len(first["tokens"]) == 5 and first["first"] == 1 and first["seconds"] > first["first_seconds"]
    assert "error" in impossible, "an impossible token"
    assert len(last["tokens"]) == 5, "and the worker lives on"


@pytest.mark.parametrize("variants", [["plain"], pytest.param(VARIANTS["hugging-face"], marks=pytest.mark.exhaustive)])
def test_a_race_with_hugging_face(monkeypatch: pytest.MonkeyPatch, variants: Sequence[str]) -> None:
    """Every variant is a process that loads transformers."""
    monkeypatch.setitem(VARIANTS, "hugging-face", variants)
    llm = LLM(method="draft-model", draft=bundled_path("draft"), dtype="float32")
    prompts = [llm.codec.encode("Once upon a time, there was a"), llm.codec.encode("The dog saw a")]
    best = Setting("draft-model", options={"num_draft_tokens": 3})
    part = race_peers(llm, best, [spec("hugging-face"), spec("vllm")], prompts, Terms(max_tokens=10, num_rounds=1))
    names = [line["name"] for line in part["lines"]]
    expected = [
        "outrider plain",
        "outrider draft-model K=3",
        *(f"hugging-face {variant}" for variant in variants),
    ]
    assert names == expected
    assert all(line["identical"] == 1.0 for line in part["lines"]), "float32 on one machine: the same text"
    assert [skip["name"] for skip in part["skipped"]] == ["vllm"]
    assert len(part["verdict"]) == 2 and "hugging-face" in peers_table(part)


def line(name: str, speed: float) -> PeerLine:
    return PeerLine(name, "", Estimate(speed, speed, speed, 3), 1.0, 1.0, 1.0, 1.0)


def test_the_verdict_is_honest() -> None:
    said = verdict(
        [line("outrider plain", 100), line("outrider suffix", 150), line("vllm plain", 200), line("vllm ngram", 120)]
    )
    assert said == ["vllm plain is 2.00x the speed of our plain decoding", "vllm plain is 1.33x the speed of our best (suffix)"]
