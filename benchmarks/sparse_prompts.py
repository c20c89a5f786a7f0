"""What sparse prompts lose and save: total variation of the next-token law, and prompt seconds, by the share that is kept.

The prompts are those of the bundled suite ``long-context``, as plain text. The target continues each greedily after the whole
prompt; along that text its law after the thinned prompt is compared with its law after the whole one. The controls keep as
many chunks: drawn at random, and the last ones. Seconds are those of reading the
prompt, the small model included: the median of --repeats runs taken in turns, with the quartiles (below 2 repeats there are
none). With --echo every prompt ends with words of its second day, so that a model that copies has to look far back. The last
line is a JSON document.

    python benchmarks/sparse_prompts.py [--model NAME --draft NAME] [--tokens 16] [--repeats 9] [--echo]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider import LLM, SamplingParams, __version__
from outrider.bench.suites import load_suites
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.importance import ImportantTokens, PromptShare
from outrider.models.sparse_prompts import SparsePrompts

_ECHO = 60
"""Characters of a repeated opening."""
SHARES = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1)
Choose = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Text:
    """A prompt and how the target goes on after all of it."""

    prompt: list[int]
    output: list[int]


def texts_of(llm: LLM, num_tokens: int, *, echo: bool) -> list[Text]:
    """Prompts of the suite. With ``echo`` each repeats its beginning at the end."""
    (suite,) = load_suites(["long-context"])
    contents = [item.turns[0] for item in suite.items]
    prompts = [f"{content}\n\n{_opening(content)}" if echo else content for content in contents]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    outputs = [llm.generate(prompt, params, method="plain")[0] for prompt in prompts]
    return [Text(list(one.prompt_token_ids), list(one.token_ids)) for one in outputs]


def _opening(content: str) -> str:
    """The first words of the diary's second day: the text that follows them stands near the beginning."""
    begin = content.index("Day 2.")
    return content[begin : begin + _ECHO]


def laws(target: Target, text: Text) -> Tensor:
    """[T, V] the laws of the tokens of the text, at temperature 1."""
    memory = target.new_cache(1)
    target.prefill([text.prompt[:-1]], memory)
    chain = TokenTree.chain(torch.tensor([[text.prompt[-1], *text.output[:-1]]], device=target.device))
    return target.score(chain, memory).logits[0].double().softmax(-1)


def choosers(reader: ImportantTokens) -> dict[str, Choose]:
    """The small model's choice, and the two controls."""
    chance = random.Random(0)
    return {
        "small model": reader,
        "random": lambda prompt: reader.share.positions(torch.tensor([chance.random() for _ in prompt])),
        "last": lambda prompt: reader.share.positions(torch.arange(len(prompt)).double()),
    }


def loss(target: Target, choose: Choose, texts: Sequence[Text], whole: Sequence[Tensor]) -> dict[str, float]:
    """Total variation at the first token and over the whole text, and how often the likeliest token is the same."""
    thinned = [laws(SparsePrompts(target, choose), text) for text in texts]
    distances = [(one - other).abs().sum(-1) / 2 for one, other in zip(thinned, whole, strict=True)]
    same = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in zip(thinned, whole, strict=True)])
    numbers = {
        "tv_first": torch.stack([one[0] for one in distances]).mean(),
        "tv_mean": torch.cat(distances).mean(),
        "tv_max": torch.cat(distances).max(),
        "same_choice": same.double().mean(),
    }
    return {name: round(float(value), 4) for name, value in numbers.items()}


def read_seconds(target: Target, texts: Sequence[Text]) -> float:
    """Seconds to read all prompts, one after the other."""
    began = time.perf_counter()
    for text in texts:
        target.prefill([text.prompt[:-1]], target.new_cache(1))
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / len(texts)


def timed(targets: dict[str, Target], texts: Sequence[Text], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds per prompt of each target: median and quartiles of runs taken in turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in targets}
    for repeat in range(repeats + 1):
        for name, target in targets.items():
            value = read_seconds(target, texts)
            if repeat:
                seconds[name].append(value)
    if repeats < 2:
        return {}
    quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in seconds.items()}
    return {name: dict(zip(("low", "median", "high"), map(_rounded, cuts))) for name, cuts in quartiles.items()}


def _rounded(seconds: float) -> float:
    return round(seconds, 5)


def report(llm: LLM, slow: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    target, texts = llm.target, texts_of(llm, arguments.tokens, echo=arguments.echo)
    whole = [laws(target, text) for text in texts]
    important = {share: ImportantTokens.of(slow.drafts[0], PromptShare(share)) for share in SHARES}
    losses = {
        f"{share}": {name: loss(target, choose, texts, whole) for name, choose in choosers(one).items()}
        for share, one in important.items()
    }
    sparse = {f"{share}": SparsePrompts(target, one) for share, one in important.items()}
    seconds = timed({"whole": target, **sparse}, texts, arguments.repeats)
    return {"prompt_tokens": [len(text.prompt) for text in texts], "losses": losses, "seconds": seconds}


def show(found: dict[str, Any]) -> None:
    print(f"prompts of {found['prompt_tokens']} tokens")
    print(f"{'kept':>6}  {'chosen by':<12}{'TV first':>9}{'TV mean':>9}{'TV max':>9}{'same choice':>13}")
    for share, ways in found["losses"].items():
        for name, one in ways.items():
            numbers = f"{one['tv_first']:>9.3f}{one['tv_mean']:>9.3f}{one['tv_max']:>9.3f}{one['same_choice']:>13.1%}"
            print(f"{float(share):>6.0%}  {name:<12}{numbers}")
    for name, one in found["seconds"].items():
        print(f"{name:>6}  {one['median'] * 1000:>8.1f} ms a prompt ({one['low'] * 1000:.1f} - {one['high'] * 1000:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--fast", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--echo", action="store_true", help="end every prompt with words that were said near its beginning")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, draft=arguments.draft, method="draft-model", dtype="float32", fast=arguments.fast)
    slow = LLM(arguments.model, draft=arguments.draft, method="draft-model", dtype="float32", fast=False)
    found = report(llm, slow, arguments)
    show(found)
    provenance = {"outrider": __version__, "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({**provenance, "echo": arguments.echo, **found}))


if __name__ == "__main__":
    main()
