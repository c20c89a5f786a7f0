"""A draft on devices of its own: PEARL and EasySpec measured against drafting in turns, and the simulator against both.

    python benchmarks/beside.py [--device cuda] [--hidden 512] [--target-layers 16] [--draft-layers 4] [--out FILE]

Models are random, so that any size can be measured without a download. The draft is the first layers of the target, and
layers add little to the stream, so guesses are often right, as those of a trained pair are. All run in the PyTorch decoder.

1. pieces: seconds of a pass of the target, of the draft, of an exact and a fuzzy pass of the draft on two processes, and of a
   target that is divided among two processes. Fewest of many repetitions. A message is what an exact pass takes longer for
   each layer.
2. placements: tokens per second in turns, with EasySpec and with PEARL. Placements take turns, and every prompt counts at its
   fastest. Each is predicted from the pieces and from the acceptance it had.
3. texts: with two ranks (NCCL wants a device for each; two on one device are connected by gloo) the text of one process.
4. projection: passes of a divided target, and drafts of the simulator, on 2, 4 and 8 devices. Labelled, not measured.

The last line is JSON. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider import LLM
from outrider.bench.costs import Sample, run_once, undisturbed
from outrider.bench.provenance import results_head
from outrider.bench.simulate import predicted_speed
from outrider.bench.simulate_easyspec import drafting_seconds
from outrider.bench.simulate_pearl import pearl_seconds
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.tree import TokenTree
from outrider.models.checkpoint import write_checkpoint
from outrider.models.load import load_model
from outrider.models.parallel import load_layers_apart, load_parallel
from outrider.models.source import Source

_CONTEXT = 64
_RESIDUAL = 0.15
"""Layers of trained models add little to the stream they read; this is how little ours do."""
_SIZES = (2, 4, 8)


def write_pair(home: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """A target and a draft of its first layers."""
    hidden, vocab = arguments.hidden, arguments.vocab
    raw = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    torch.manual_seed(0)

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns) * scale / columns**0.5

    ends = {"embed_tokens.weight": torch.randn(vocab, hidden), "norm.weight": torch.ones(hidden)}
    tensors = {f"model.{name}": tensor for name, tensor in ends.items()} | {"lm_head.weight": drawn(vocab, hidden, 4.0)}
    layers = [_layer(f"model.layers.{index}.", hidden, drawn) for index in range(arguments.target_layers)]
    names = []
    for kind, count in (("target", arguments.target_layers), ("draft", arguments.draft_layers)):
        held = {name: tensor.clone() for part in (tensors, *layers[:count]) for name, tensor in part.items()}
        write_checkpoint(home / kind, held, config={**raw, "num_hidden_layers": count})
        names.append(str(home / kind))
    return names[0], names[1]


def _layer(at: str, hidden: int, drawn: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    square = {f"{at}self_attn.{letter}_proj.weight": drawn(hidden, hidden) for letter in "qkv"}
    wide = {f"{at}mlp.{name}_proj.weight": drawn(4 * hidden, hidden) for name in ("gate", "up")}
    norms = {f"{at}{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
    outs = {f"{at}self_attn.o_proj.weight": drawn(hidden, hidden, _RESIDUAL)}
    return {**square, **wide, **norms, **outs, f"{at}mlp.down_proj.weight": drawn(hidden, 4 * hidden, _RESIDUAL)}


def pass_seconds(model: Target, num_nodes: int, repeats: int, *, settles: bool = False) -> float:
    """Fewest seconds of a pass behind a context; ``settles`` lets every pass be the first of a round."""
    cache = model.new_cache(1)
    model.prefill([list(range(_CONTEXT))], cache)
    tree = TokenTree.chain(torch.arange(num_nodes, device=model.device)[None])
    best = float("inf")
    for _ in range(repeats):
        if settles:
            cache.settle()
        began = time.perf_counter()
        float(model.score(tree, cache).logits[0, -1, 0])  # the number has to arrive
        best = min(best, time.perf_counter() - began)
    return best


def pieces_of(names: tuple[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """What passes cost here."""
    how = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    repeats, lengths = arguments.repeats, range(1, arguments.length + 2)
    target, draft = (load_model(name, **how) for name in names)
    found: dict[str, Any] = {"target": [pass_seconds(target, nodes, repeats) for nodes in lengths]}
    found["draft"] = pass_seconds(draft, 1, repeats)
    spread = load_layers_apart(names[1], 2, **how)
    found["exact"] = pass_seconds(spread, 1, repeats, settles=True)
    found["fuzzy"] = pass_seconds(spread, 1, repeats)
    spread.team.close()
    divided = load_parallel(Source(names[0]), 2, **how)
    found["divided"] = pass_seconds(divided, 1, repeats)
    divided.team.close()
    found["message"] = max(0.0, (found["exact"] - found["draft"]) / arguments.draft_layers)
    return found


def placements(names: tuple[str, str], arguments: argparse.Namespace) -> dict[str, LLM]:
    """The same pair with the draft in several places."""
    places: dict[str, dict[str, Any]] = {"in turns": {}, "easyspec": {"draft_parallel": 2}, "pearl": {"draft_process": True}}
    how = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    return {name: LLM(names[0], draft=names[1], **how, **place) for name, place in places.items()}


def measured(llms: Mapping[str, LLM], arguments: argparse.Namespace) -> dict[str, Sample]:
    """Plain decoding and every placement, in turns."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(arguments.vocab, (arguments.prompts, 16), generator=generator).tolist()
    methods = {"plain": llms["in turns"].compose("plain")}
    for name, llm in llms.items():
        row = "pearl" if name == "pearl" else "draft-model"
        methods[name] = llm.compose(row, policy="fixed", num_draft_tokens=arguments.length)
    samples: dict[str, list[Sample]] = {name: [] for name in methods}
    for _ in range(arguments.rounds):
        for name, method in methods.items():
            llm = llms.get(name, llms["in turns"])
            samples[name].append(run_once(llm, method, prompts, max_tokens=arguments.max_tokens))
    return {name: undisturbed(many) for name, many in samples.items()}


def predicted(
    name: str, pieces: Mapping[str, Any], host: float, by_depth: Sequence[float], arguments: argparse.Namespace
) -> float:
    """Tokens per second by the simulator's formulas; ``by_depth`` is the acceptance of chains."""
    count, length = arguments.max_tokens, arguments.length

    def checking(guesses: int) -> float:
        return pieces["target"][guesses] + host

    if name == "pearl":
        seconds = pearl_seconds(count, length, by_depth, score=checking, draft=lambda steps: steps * pieces["draft"])
        return count / seconds
    first, later = (pieces["exact"], pieces["fuzzy"]) if name == "easyspec" else (pieces["draft"], pieces["draft"])
    drafting = partial(drafting_seconds, exact=first, fuzzy=later)
    return predicted_speed(count, length, by_depth, lambda guesses: checking(guesses) + drafting(guesses))


def rows_of(pieces: Mapping[str, Any], samples: Mapping[str, Sample], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tokens = arguments.max_tokens * arguments.prompts
    plain = sum(samples["plain"].by_prompt)
    host = max(0.0, plain / tokens - pieces["target"][0])
    turns = sum(samples["in turns"].by_prompt)
    rows: list[dict[str, Any]] = []
    for name in ("in turns", "easyspec", "pearl"):
        sample = samples[name]
        chains = samples["in turns"] if name == "pearl" else sample
        seconds, by_depth = sum(sample.by_prompt), chains.tally.by_depth
        expected = predicted(name, pieces, host, by_depth, arguments)
        told = {"placement": name, "tokens_per_s": tokens / seconds, "against_turns": turns / seconds}
        told |= {"against_plain": plain / seconds, "acceptance": by_depth, "predicted_tokens_per_s": expected}
        rows.append({**told, "error": expected * seconds / tokens - 1})
    return rows


def wrong_texts(names: tuple[str, str], arguments: argparse.Namespace) -> dict[str, int]:
    """Texts that differ from those of one process and plain decoding, of 8 prompts, greedy and seeded."""
    how = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    prompts = [[index, 2 * index, 3] for index in range(8)]
    sampling = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(8)]
    plain = LLM(names[0], method="plain", **how).generate(prompts, sampling)
    found: dict[str, int] = {}
    places: dict[str, dict[str, Any]] = {"tensor_parallel": {"tensor_parallel": 2}, "draft_parallel": {"draft_parallel": 2}}
    for name, place in places.items():
        llm = LLM(names[0], draft=names[1], **how, **place)
        ours = llm.generate(prompts, sampling, method=llm.compose("draft-model", policy="fixed", num_draft_tokens=3))
        found[name] = sum(mine.token_ids != one.token_ids for mine, one in zip(ours, plain, strict=True))
    return found


def projection(pieces: Mapping[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Passes on machines that are not here: weights are divided, a layer has two messages, a group of layers has two."""
    layers, message, rows = arguments.draft_layers, pieces["message"], []
    for size in _SIZES:
        divided = pieces["target"][0] / size + 2 * arguments.target_layers * message
        fuzzy = pieces["draft"] / size + 2 * -(-layers // size) * message
        exact = pieces["draft"] + layers * message
        rows.append({"devices": size, "target_pass_s": divided, "fuzzy_s": fuzzy, "exact_s": exact, "kind": "projection"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--target-layers", type=int, default=16)
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--length", "-K", type=int, default=4, help="guesses of a round")
    parser.add_argument("--max-tokens", "-n", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as home:
        names = write_pair(Path(home), arguments)
        pieces = pieces_of(names, arguments)
        print(pieces, file=sys.stderr, flush=True)
        rows = rows_of(pieces, measured(placements(names, arguments), arguments), arguments)
        wrong = wrong_texts(names, arguments)
    told = results_head("a draft on devices of its own: measured and predicted", script="benchmarks/beside.py")
    told |= {"pieces": pieces, "rows": rows}
    told |= {"wrong_texts": wrong, "projection": projection(pieces, arguments)}
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
