"""A draft on devices of its own: drafting beside, PEARL and EasySpec against drafting in turns, and the simulator.

    python benchmarks/beside.py [--device cuda] [--hidden 512] [--target-layers 16] [--draft-layers 4] [--out FILE]

Models are random, so that any size can be measured without a download. The draft is the first layers of the target, and
layers add little to the stream, so guesses are often right, as those of a trained pair are. All run in the PyTorch decoder.

1. pieces: seconds of a pass of the target, of the draft, and of an exact and a fuzzy pass of the draft on two processes. A
   target and a draft that are divided by heads among two processes are timed too. The fewest of many repetitions count. A
   message is the additional time of an exact pass for each layer.
2. placements: tokens per second in turns, beside, with EasySpec and with PEARL. "beside" is the same row, a round ahead.
   Placements take turns, and every prompt counts at its
   fastest. Each is predicted from passes of the target, from the acceptance, and from what its draft costs in rounds. That
   cost is measured with a stranger: a draft of the same shape and other weights, whose guesses are wrong. No time of the
   run that is predicted is used. A text is a prompt that is read, and rounds: texts of two lengths say what both cost.
   Trees are measured in turns and beside too ("draft-tree").
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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider import LLM
from outrider.bench.costs import RoundCosts, Sample, run_once, undisturbed
from outrider.bench.curves import PassCurve
from outrider.bench.provenance import results_head
from outrider.bench.simulate import Cost, expected_seconds
from outrider.bench.simulate_pearl import beside_seconds, pearl_seconds
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.tree import TokenTree
from outrider.models.checkpoint import write_checkpoint
from outrider.models.load import load_model
from outrider.models.parallel import load_layers_apart, load_parallel
from outrider.models.source import Source

_CONTEXT = 64
_RESIDUAL = 0.02
"""Layers of trained models add little to the stream they read; this is how little ours do, so that most guesses are right."""
_SIZES = (2, 4, 8)
_PLACES: dict[str, dict[str, Any]] = {
    "in turns": {},
    "beside": {"draft_process": True},
    "pearl": {"draft_process": True},
    "easyspec": {"draft_parallel": 2},
}
_TREES = {"in turns": "tree in turns", "beside": "tree beside"}
"""Placements in which a tree is measured too, and the names of its samples."""
_AT_ONCE = {"beside": beside_seconds, "pearl": pearl_seconds}
"""Placements whose draft works while the target does, with the simulator's formula."""


class Names(NamedTuple):
    """Folders of checkpoints."""

    target: str
    draft: str
    stranger: str


def write_models(home: Path, arguments: argparse.Namespace) -> Names:
    """A target, a draft of its first layers, and a stranger of the draft's shape."""
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

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    tensors["lm_head.weight"] = drawn(vocab, hidden, 4.0)
    layers = [_layer(f"model.layers.{index}.", hidden, drawn) for index in range(arguments.target_layers)]
    other = tensors | {"lm_head.weight": drawn(vocab, hidden, 4.0)}
    num_draft = arguments.draft_layers
    for kind, ends, count in (("target", tensors, len(layers)), ("draft", tensors, num_draft), ("stranger", other, num_draft)):
        held = {name: tensor.clone() for part in (ends, *layers[:count]) for name, tensor in part.items()}
        write_checkpoint(home / kind, held, config={**raw, "num_hidden_layers": count})
    return Names(*(str(home / kind) for kind in Names._fields))


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


def pieces_of(names: Names, arguments: argparse.Namespace) -> dict[str, Any]:
    """What passes cost here."""
    how: dict[str, Any] = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    repeats, lengths = arguments.repeats, range(1, arguments.length + 2)
    target, draft = (load_model(name, **how) for name in (names.target, names.draft))
    found: dict[str, Any] = {"target": [pass_seconds(target, nodes, repeats) for nodes in lengths]}
    found["draft"] = pass_seconds(draft, 1, repeats)
    found["read"] = max(0.0, pass_seconds(draft, 2, repeats) - found["draft"])
    if "easyspec" not in arguments.places:
        return found
    spread = load_layers_apart(names.draft, 2, **how)
    found["exact"] = pass_seconds(spread, 1, repeats, settles=True)
    found["fuzzy"] = pass_seconds(spread, 1, repeats)
    spread.team.close()
    divided = load_parallel(Source(names.target), 2, **how)
    found["divided"] = pass_seconds(divided, 1, repeats)
    divided.team.close()
    by_heads = load_parallel(Source(names.draft), 2, **how)
    found["draft_by_heads"] = pass_seconds(by_heads, 1, repeats)
    by_heads.team.close()
    found["message"] = max(0.0, (found["exact"] - found["draft"]) / arguments.draft_layers)
    return found


def places_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The placements that are compared, drafting in turns first."""
    return {place: options for place, options in _PLACES.items() if place == "in turns" or place in arguments.places}


def measured(names: Names, arguments: argparse.Namespace) -> dict[str, Sample]:
    """Plain decoding, every placement, and every placement with the stranger, in turns."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(arguments.vocab, (arguments.prompts, 16), generator=generator).tolist()
    how: dict[str, Any] = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    opened = {
        (place, draft): LLM(names.target, draft=draft, **how, **options)
        for place, options in places_of(arguments).items()
        for draft in (names.draft, names.stranger)
    }
    runs: dict[str, tuple[LLM, Method, int]] = {}
    short = arguments.max_tokens // 8
    for (place, draft), llm in opened.items():
        is_strange = draft == names.stranger
        row = "pearl" if place == "pearl" and not is_strange else "draft-model"
        length = arguments.length + (place in _AT_ONCE and is_strange)  # they draft one more, for the target's own token
        more: dict[str, Any] = {"beside": True} if place == "beside" and not is_strange else {}
        method = llm.compose(row, policy="fixed", num_draft_tokens=length, **more)
        if not is_strange:
            runs[place] = (llm, method, arguments.max_tokens)
            if place in _TREES:
                tree = llm.compose("draft-tree", policy="fixed", branching=f"2{',1' * (arguments.length - 1)}", **more)
                runs[_TREES[place]] = (llm, tree, arguments.max_tokens)
            continue
        plain = llm.compose("plain")
        runs |= {"plain": (llm, plain, arguments.max_tokens), "plain, short": (llm, plain, short)}
        strange = f"{place}, strange"  # its rounds emit one token each, so half the text is enough
        runs |= {strange: (llm, method, arguments.max_tokens // 2), f"{strange}, short": (llm, method, short)}
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, (llm, method, count) in runs.items():
            samples[name].append(run_once(llm, method, prompts, max_tokens=count))
    return {name: undisturbed(many) for name, many in samples.items()}


class Line(NamedTuple):
    """What texts of two lengths cost."""

    opening: float
    """Seconds of a text before its rounds: the prompt is read."""
    per_round: float

    @staticmethod
    def of(samples: Mapping[str, Sample], name: str) -> Line:
        long, short = samples[name], samples[f"{name}, short"]
        per_round = (long.seconds - short.seconds) / (long.tally.num_passes - short.tally.num_passes)
        return Line(max(0.0, long.seconds - per_round * long.tally.num_passes) / len(long.by_prompt), per_round)


def predicted(
    place: str, checking: Cost, drafting: tuple[float, float], by_depth: Sequence[float], arguments: argparse.Namespace
) -> float:
    """Seconds of the rounds of a text by the simulator's formulas. ``drafting``: the time of a chain, and what it takes more
    where the guess before it was accepted and has to be read too."""
    count, length, (chain, read) = arguments.max_tokens, arguments.length, drafting
    if place in _AT_ONCE:
        return _AT_ONCE[place](count, length, by_depth, score=checking, draft=lambda k: chain * k / (length + 1))
    return expected_seconds(count, length, by_depth, lambda k: checking(k) + chain * k / length, read=read)


def rows_of(pieces: Mapping[str, Any], samples: Mapping[str, Sample], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tokens = arguments.max_tokens * arguments.prompts
    plain, turns = samples["plain"].seconds, samples["in turns"].seconds
    passes = PassCurve(_CONTEXT, 1, tuple(range(1, len(pieces["target"]) + 1)), tuple(pieces["target"]))
    costs = RoundCosts(passes, host=max(0.0, Line.of(samples, "plain").per_round - passes.at(1)))
    rows: list[dict[str, Any]] = []
    for place in places_of(arguments):
        sample, strange = samples[place], samples[f"{place}, strange"]
        by_depth = samples["in turns" if place in _AT_ONCE else place].tally.by_depth  # pearl's own count is of another walk
        line = Line.of(samples, f"{place}, strange")
        drafting = line.per_round - costs.seconds(strange.guesses)
        rounds = predicted(place, costs.seconds, (drafting, pieces["read"]), by_depth, arguments)
        expected = arguments.max_tokens / (line.opening + rounds)
        told = {"placement": place, "tokens_per_s": tokens / sample.seconds, "against_turns": turns / sample.seconds}
        told |= {"against_plain": plain / sample.seconds, "acceptance": by_depth, "drafting_s": drafting, "host_s": costs.host}
        told["opening_s"] = line.opening
        rows.append({**told, "predicted_tokens_per_s": expected, "error": expected * sample.seconds / tokens - 1})
    for row in rows:
        row["predicted_against_turns"] = row["predicted_tokens_per_s"] / rows[0]["predicted_tokens_per_s"]
        row["gain_error"] = row["predicted_against_turns"] / row["against_turns"] - 1
    return rows


def trees_of(samples: Mapping[str, Sample], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trees in turns and beside."""
    tokens, turns = arguments.max_tokens * arguments.prompts, samples["tree in turns"].seconds
    return [
        {"placement": name, "tokens_per_s": tokens / samples[name].seconds, "against_turns": turns / samples[name].seconds}
        for name in _TREES.values()
        if name in samples
    ]


def wrong_texts(names: Names, arguments: argparse.Namespace) -> dict[str, int]:
    """Texts that differ from those of one process and plain decoding, of 8 prompts, greedy and seeded."""
    how: dict[str, Any] = {"dtype": arguments.dtype, "device": arguments.device, "fast": False}
    prompts = [[index, 2 * index, 3] for index in range(8)]
    sampling = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(8)]
    plain = LLM(names.target, method="plain", **how).generate(prompts, sampling)
    found: dict[str, int] = {}
    places: dict[str, dict[str, Any]] = {"tensor_parallel": {"tensor_parallel": 2}, "draft_parallel": {"draft_parallel": 2}}
    for name, place in places.items():
        llm = LLM(names.target, draft=names.draft, **how, **place)
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
    parser.add_argument("--places", nargs="+", default=list(_PLACES), choices=list(_PLACES), help="what is compared")
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as home:
        names = write_models(Path(home), arguments)
        pieces = pieces_of(names, arguments)
        print(pieces, file=sys.stderr, flush=True)
        samples = measured(names, arguments)
        rows = rows_of(pieces, samples, arguments)
        wrong = wrong_texts(names, arguments) if "easyspec" in arguments.places else {}
    told = results_head("a draft on devices of its own: measured and predicted", script="benchmarks/beside.py")
    told |= {"pieces": pieces, "rows": rows, "trees": trees_of(samples, arguments)}
    told |= {"wrong_texts": wrong, "projection": projection(pieces, arguments) if "message" in pieces else []}
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
