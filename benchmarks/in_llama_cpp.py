"""Drafts of ours inside llama.cpp: its text and its acceptance beside ours, for the bundled target.

    python benchmarks/in_llama_cpp.py LLAMA_SPECULATIVE_SIMPLE [--dflash HEADS] [-n 48] [-K 4] [--out FILE]

The first argument is the program ``llama-speculative-simple`` of a llama.cpp build. The bundled target, its draft model and its
EAGLE-3 head are exported as GGUF files in float32; --dflash adds a folder of trained DFlash heads. The engine llama.cpp
continues every prompt greedily with each of them, and so does our engine with chains of the same length. Two differences
remain: llama.cpp ends after the round that passes the limit, and its matrices are rounded in other places. So texts are
compared up to the limit, and acceptance as a rate. The last line is JSON. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.cli.main import main as outrider

_PROMPTS = (
    "Once upon a time there was a little dog",
    "Lily and Tom were in the park. They saw a",
    "The sun was warm and the birds were singing. A boy",
    "One day, a girl found a big red box under her bed.",
)
_LIMIT_S = 300


def exported(folder: str, out: Path, *more: str) -> Path:
    if outrider(["export", folder, "gguf", "--out", str(out), "--dtype", "float32", *more]) != 0:
        raise SystemExit(f"{folder} could not be exported; the reason is above")
    return out


def theirs(command: list[str], prompt: str, num_tokens: int) -> tuple[str, int, int]:
    """llama.cpp's continuation, and how many guesses were made and accepted."""
    asked = [*command, "-p", prompt, "-n", str(num_tokens), "--temp", "0", "-t", "1", "-c", "512"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    told = done.stdout + done.stderr
    drafted, accepted = (int(re.findall(rf"{name}\s*= (\d+)", told)[-1]) for name in ("n_drafted", "n_accept"))
    return done.stdout.partition(prompt)[2], drafted, accepted


def compared(name: str, command: list[str], llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """One kind of draft on all prompts."""
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
    row: dict[str, Any] = {
        "draft": name,
        "texts": len(_PROMPTS),
        "different": 0,
        "llama_cpp_guesses": 0,
        "llama_cpp_accepted": 0,
    }
    guesses = accepted = 0
    for prompt in _PROMPTS:
        text, drafted, kept = theirs(command, prompt, arguments.max_tokens)
        (ours,) = llm.generate([prompt], params)
        row["different"] += not text.strip().startswith(ours.text.strip())
        row["llama_cpp_guesses"] += drafted
        row["llama_cpp_accepted"] += kept
        guesses, accepted = guesses + ours.stats.num_drafted, accepted + ours.stats.num_accepted
    row |= {"our_guesses": guesses, "our_accepted": accepted, "our_acceptance": round(accepted / guesses, 3)}
    row["llama_cpp_acceptance"] = round(row["llama_cpp_accepted"] / row["llama_cpp_guesses"], 3)
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="llama-speculative-simple")
    parser.add_argument("--dflash", help="a folder of DFlash heads for the bundled target")
    parser.add_argument("--max-tokens", "-n", type=int, default=48)
    parser.add_argument("--length", "-K", type=int, default=4, help="guesses of a round")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    target = bundled_path("target")
    kinds = {"draft-model": ("draft-simple", bundled_path("draft")), "eagle3": ("draft-eagle3", bundled_path("heads/eagle3"))}
    kinds |= {"dflash": ("draft-dflash", arguments.dflash)} if arguments.dflash else {}
    rows = []
    with tempfile.TemporaryDirectory() as home:
        whole = exported(target, Path(home) / "target.gguf")
        for name, (mode, folder) in kinds.items():
            is_model = name == "draft-model"
            draft = exported(folder, Path(home) / f"{name}.gguf", *([] if is_model else ["--target", target]))
            command = [arguments.program, "-m", str(whole), "-md", str(draft), "--spec-type", mode]
            command += ["--spec-draft-n-max", str(arguments.length)]
            how: dict[str, Any] = {"draft": folder} if is_model else {"heads": folder, "branching": "chain"}
            chain = {"policy": "fixed", "num_draft_tokens": arguments.length, "dtype": "float32", "device": "cpu"}
            llm = LLM(target, method=name, **chain, **how)
            rows.append(compared(name, command, llm, arguments))
    told = keep_results(arguments.out, "drafts of ours inside llama.cpp", rows, script="benchmarks/in_llama_cpp.py")
    print(json.dumps(told))
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
