"""How far the bfloat16 text of `generate` depends on the order of its sums, and how far the drop-in's text is from it.

    python benchmarks/drop_in_rounding.py MODEL [--prompts 8] [-n 32] [--out FILE]

MODEL is a folder that transformers opens. PyTorch's product of bfloat16 matrices is a sum in float32, rounded at its end. The
order of the sum depends on the machine and on how many rows share the product. Here the model's own modules run with such sums
in two orders: from end to end, and as two halves. The program first shows how many results of PyTorch's own products differ
from the first order. Then three texts are compared: plain `generate` in the first order, in the second, and the drop-in. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider.transformers
from outrider.bench.provenance import keep_results
from outrider.bench.suites import load_suites
from outrider.core.tree import TokenTree
from outrider.transformers.hf_in_place import InPlace

Product = Callable[[Tensor, Tensor], Tensor]


def from_end_to_end(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs @ weight.t()


def as_halves(inputs: Tensor, weight: Tensor) -> Tensor:
    half = weight.shape[1] // 2
    return inputs[..., half:] @ weight[:, half:].t() + inputs[..., :half] @ weight[:, :half].t()


@contextmanager
def summed(product: Product, widened: dict[int, Tensor]) -> Iterator[None]:
    """Linear layers as float32 sums in that order, rounded to bfloat16. ``widened`` keeps the weights as floats."""
    usual = functional.linear

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in widened:
            widened[id(weight)] = weight.detach().float()
        found = product(inputs.float(), widened[id(weight)])
        return (found if bias is None else found + bias.float()).to(inputs.dtype)

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = usual


def rounded_otherwise(model: Any, num_rows: int) -> dict[str, Any]:
    """Shares of the results of a layer's product that are another bfloat16 than in the first order."""
    weight = model.model.layers[0].self_attn.q_proj.weight.detach()
    inputs = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    first = from_end_to_end(inputs.float(), weight.float()).bfloat16()
    others = {
        "of_pytorch": functional.linear(inputs, weight),
        "as_halves": as_halves(inputs.float(), weight.float()).bfloat16(),
    }
    return {"rows": num_rows, **{name: float((found != first).float().mean()) for name, found in others.items()}}


def best_tokens(model: Any, prompts: Sequence[Tensor], product: Product, widened: dict[int, Tensor]) -> Tensor:
    """The best next token at every place of the prompts."""
    with summed(product, widened), torch.no_grad():
        return torch.cat([model(input_ids=prompt).logits[0].argmax(-1) for prompt in prompts])


def ours(model: Any, prompts: Sequence[Tensor]) -> Tensor:
    """The same by the native pass on the model's matrices."""
    target = InPlace().target(model)
    assert target is not None, "the native pass knows this model"
    scores = [target.score(TokenTree.chain(prompt), target.new_cache(1)) for prompt in prompts]
    return torch.cat([found.logits[0].argmax(-1) for found in scores])


def compared(model: Any, prompts: Sequence[Tensor], max_tokens: int) -> dict[str, Any]:
    """Places with another best token, and texts that differ from plain ``generate`` in the first order."""
    widened: dict[int, Tensor] = {}
    loop = outrider.transformers.generate(method="suffix")
    ways = {"first": from_end_to_end, "other_order": as_halves, "drop_in": from_end_to_end}
    texts: dict[str, list[list[int]]] = {name: [] for name in ways}
    for number, prompt in enumerate(prompts):
        for name, product in ways.items():
            extra = {"custom_generate": loop} if name == "drop_in" else {}
            with summed(product, widened):
                found = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False, **extra
                )
            texts[name].append(found[0, prompt.shape[1] :].tolist())
        print(number, {name: texts[name][-1] == texts["first"][-1] for name in ways}, file=sys.stderr, flush=True)
    with summed(from_end_to_end, widened):
        mine = ours(model, prompts)
    places = {name: best_tokens(model, prompts, ways[name], widened) for name in ("first", "other_order")} | {"drop_in": mine}
    return {
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "places": len(mine),
        **{f"places_{name}": int((places[name] != places["first"]).sum()) for name in ("other_order", "drop_in")},
        **{f"texts_{name}": _num_different(texts[name], texts["first"]) for name in ("other_order", "drop_in")},
    }


def _num_different(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=8, help="the shortest ones of the editing suite")
    parser.add_argument("--max-tokens", "-n", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    items = sorted(load_suites(["editing"])[0].items, key=lambda item: len(item.turns[0]))[: arguments.prompts]
    asked = [[{"role": "user", "content": item.turns[0]}] for item in items]
    chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for messages in asked]
    prompts = [tokenizer(chat, return_tensors="pt", add_special_tokens=False).input_ids for chat in chats]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    products = [rounded_otherwise(model, num_rows) for num_rows in (1, 8)]
    what, script = "bfloat16 text and the order of sums", "benchmarks/drop_in_rounding.py"
    rows = [compared(model, prompts, arguments.max_tokens)]
    print(json.dumps(keep_results(arguments.out, what, rows, script=script, products=products)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
