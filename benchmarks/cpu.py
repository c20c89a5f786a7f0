"""The CPU fast path against its floor and against the CPU engines people use: same weights, prompts, precision, threads.

    python benchmarks/cpu.py [--sizes small mid] [--json FILE]
                             [--peer hugging-face] [--peer openvino=PYTHON,model=DIR,draft=DIR]
    python benchmarks/cpu.py --gguf FILE [--gguf-draft FILE] [--peer llama-cpp=PYTHON]

Models are made on the first run (benchmarks/cpu_models.py), or are GGUF files of yours, multiplied as stored. Three questions:
what a pass costs as it gets wider, where the time of a round goes, and who is faster (a 128-token prompt, greedy, decode speed
after the first token, engines in turns). ``{size}`` in a peer's paths becomes the size; peers that are not there are skipped,
with the reason. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import LLM
from outrider.bench.bandwidth import read_speed
from outrider.bench.decode import decode
from outrider.bench.peers.peer import PeerSpec
from outrider.bench.peers.race import race_peers
from outrider.bench.provenance import provenance
from outrider.bench.settings import Setting
from outrider.core.params import SamplingParams
from outrider.core.tree import TokenTree
from outrider.models.native import NativeDecoder, isa_here, ready_to_measure

sys.path.insert(0, str(Path(__file__).parent))
from cpu_models import make_models

WIDTHS = (1, 5, 16, 64)
TREES = (16, 64)
CONTEXT = 192
STORIES = (
    "Once upon a time, there was a little fox who lived in a forest. The fox had a red ball and liked to play with it. ",
    "Tom and Lily went to the park. They saw a big dog. The dog was sad because it had lost its bone. Tom said to Lily: ",
    "One day, a girl named Mia found a box in the garden. She wanted to open the box, but the box was shut. Her brother ",
)
SETTINGS = {
    "plain": Setting("plain"),
    "draft-model K=4": Setting("draft-model", options={"num_draft_tokens": 4}),
    "draft-model": Setting("draft-model", policy="adaptive"),
    "best-first 5/12": Setting("best-first", options={"num_draft_tokens": 5, "num_tree_nodes": 12}),
    "prompt-lookup": Setting("prompt-lookup", policy="adaptive"),
}


def pass_costs(llm: LLM, *, rounds: int) -> dict[str, float]:
    """Median milliseconds of a pass over a chain or a binary tree of each width, in turns."""
    target, cache = llm.target, llm.target.new_cache(1)
    target.prefill([[5 + i % 900 for i in range(CONTEXT)]], cache)
    tokens = torch.randint(5, 900, (max(WIDTHS),)).tolist()
    trees = {str(width): TokenTree.chain(torch.tensor([tokens[:width]])) for width in WIDTHS}
    trees |= {f"{n} in a tree": TokenTree.of_rows([(tokens[:n], [(i - 1) // 2 for i in range(n)])]) for n in TREES}
    times: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(rounds + 2):
        for name, tree in trees.items():
            began = time.perf_counter()
            target.score(tree, cache)
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(seen[2:]) for name, seen in times.items()}


def prompts_of(llm: LLM) -> list[list[int]]:
    return [(llm.codec.encode(story) * 8)[:128] for story in STORIES]


def own_methods(llm: LLM, settings: dict[str, Setting], *, rounds: int, max_tokens: int) -> dict[str, dict[str, float]]:
    """Tokens per second and the parts of a round, methods in turns."""
    methods = {name: setting.compose(llm) for name, setting in settings.items()}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in methods}
    texts: dict[str, list[list[int]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for prompt in prompts_of(llm):
            for name, method in methods.items():
                done = decode(llm, method, [prompt], [params])
                stats = done.states[0].stats
                parts = stats.draft_seconds, stats.score_seconds, stats.seconds - stats.draft_seconds - stats.score_seconds
                if number:
                    runs[name].append((stats.num_tokens / stats.seconds, *(p / stats.num_passes for p in parts)))
                    runs[name][-1] += (stats.num_tokens / stats.num_passes,)
                else:
                    texts[name].append(done.outputs[0])
    keys: list[str] = ["tokens_per_second", "draft", "verify", "rest", "tokens_per_pass"]
    found = {name: dict(zip(keys, map(statistics.median, zip(*rows)))) for name, rows in runs.items()}
    for name, parts in found.items():
        parts["same_text"] = sum(a == b for a, b in zip(texts[name], texts["plain"])) / len(texts["plain"])
    return found


@dataclass(frozen=True)
class Pair:
    """A model, and its draft where it has one."""

    name: str
    model: str
    draft: str | None
    dtype: str

    @property
    def settings(self) -> dict[str, Setting]:
        """Methods that can run."""
        return {name: one for name, one in SETTINGS.items() if self.draft or name in ("plain", "prompt-lookup")}


def bytes_read(pair: Pair, llm: LLM) -> int:
    """What a pass over one token reads of the weights: the packed matrices, or what the checkpoint holds."""
    if isinstance(llm.target, NativeDecoder):
        return llm.target.num_bytes
    return (Path(pair.model) / "model.safetensors").stat().st_size * (2 if pair.dtype == "float32" else 1)


def measure(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    ready_to_measure()
    llm = LLM(pair.model, draft=pair.draft, dtype=pair.dtype)
    num_bytes = bytes_read(pair, llm)
    costs = pass_costs(llm, rounds=args.rounds * 4)
    bandwidth = read_speed(num_bytes, llm.target.device) / 1e9
    share, floor, isa = num_bytes / costs["1"] / 1e6 / bandwidth, num_bytes / bandwidth / 1e6, isa_here().name
    print(f"\n{pair.name}, {pair.dtype}, {isa}: {num_bytes / 1e6:.0f} MB, memory reads {bandwidth:.1f} GB/s, context {CONTEXT}")
    print(
        f"pass, ms:  floor {floor:.2f} (bytes over read speed)   "
        + "   ".join(f"nodes {w}: {ms:.2f} ({ms / costs['1']:.2f}x)" for w, ms in costs.items())
        + f"   {share:.0%} of bandwidth"
    )
    own = own_methods(llm, pair.settings, rounds=args.rounds, max_tokens=args.max_tokens)
    print_methods(own)
    document: dict[str, Any] = {"isa": isa, "pass_ms": costs, "floor_ms": floor, "bandwidth_gb": bandwidth}
    document |= {"bandwidth_share": share, "ours": own}
    specs = [PeerSpec.of(text.replace("{size}", pair.name), model=pair.model, draft=pair.draft) for text in args.peer]
    if specs:
        best = max((name for name in own if name != "plain"), key=lambda name: own[name]["tokens_per_second"])
        document["peers"] = race_peers(
            llm, SETTINGS[best], specs, prompts_of(llm), max_tokens=args.max_tokens, num_rounds=args.rounds
        )
        print_peers(document["peers"])
    return document


def print_methods(own: dict[str, dict[str, float]]) -> None:
    print(f"{'ours':<20} {'tokens/s':>9} {'to plain':>9} {'tok/pass':>9} {'draft':>8} {'verify':>8} {'rest ms':>8}  same text")
    for name, parts in own.items():
        ratio = parts["tokens_per_second"] / own["plain"]["tokens_per_second"]
        cells = f"{parts['tokens_per_pass']:>9.2f}" + "".join(
            f"{1e3 * parts[key]:>9.2f}" for key in ("draft", "verify", "rest")
        )
        print(f"{name:<20} {parts['tokens_per_second']:>9.1f} {ratio:>8.2f}x {cells}  {parts['same_text']:.0%}")


def print_peers(document: dict[str, Any]) -> None:
    for line in document["lines"]:
        speed = f"{line['speed']['value']:>8.1f} tokens/s   {line['to_our_plain']:.2f}x our plain"
        print(f"  {line['name']:<32} {speed}   same text {line['identical']:.0%}   {line['version']}")
    for line in document["skipped"]:
        print(f"  {line['name']}: skipped, {line['reason']}")
    print("  " + "\n  ".join(document["verdict"]))


def pairs_of(args: argparse.Namespace) -> list[Pair]:
    """The GGUF file that was given, or the models of every size."""
    if args.gguf:
        draft = str(args.gguf_draft) if args.gguf_draft else None
        return [Pair(args.gguf.name, str(args.gguf), draft, args.dtype or "auto")]
    folders = make_models(args.models)
    return [Pair(size, str(folders[size]), str(folders[f"{size}-draft"]), args.dtype or "bfloat16") for size in args.sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small", "mid"])
    parser.add_argument("--gguf", type=Path, help="a GGUF file instead of the sizes")
    parser.add_argument("--gguf-draft", type=Path, help="a GGUF file with the same vocabulary")
    parser.add_argument("--dtype", help="bfloat16 where none is given, auto for a GGUF file")
    parser.add_argument("--models", type=Path, default=Path("build/cpu"))
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE[=PYTHON[,model=DIR,draft=DIR]]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    document = {pair.name: measure(pair, args) for pair in pairs_of(args)} | provenance()
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
