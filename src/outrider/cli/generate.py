"""Runs ``outrider generate``: texts, their origins, and the comparison with plain decoding."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from outrider.api import LLM, RequestOutput
from outrider.cli.offline import AnswerWriter, job_seed, run_job, settings_of
from outrider.cli.options import load_llm, sampling_of, with_grammar
from outrider.cli.parsers.generate import STOPPING
from outrider.cli.progress import first_explained, waiting
from outrider.cli.terminal import bold, can_colour, coloured, dim, legend
from outrider.cli.verdict import Idle, acceptance_of, share_text, verdict
from outrider.core.errors import OptionError, RequestError
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Origin
from outrider.engine.beam import BeamOptions
from outrider.models.native import ready_to_measure

_REPEATS = 3
"""Timed runs of each side of a comparison, alternating after one warm-up each."""


def run(arguments: argparse.Namespace) -> int:
    params = sampling_of(arguments)
    texts = _read_prompts(arguments)
    if arguments.ray:
        return _on_ray(arguments, texts)
    if arguments.compare:
        ready_to_measure()
    llm = load_llm(arguments, max_batch_size=arguments.batch_size)
    params = with_grammar(params, llm, arguments)
    prompts = [llm.codec.encode_chat([{"role": "user", "content": text}]) if arguments.chat else text for text in texts]
    if arguments.num_beams > 1:
        return _beams(llm, prompts, params, arguments)
    if arguments.compare:
        return _compare(llm, texts, prompts, params, arguments)
    if arguments.json or len(prompts) > 1:
        has_bar = len(prompts) > 1 and sys.stderr.isatty()
        with nullcontext() if has_bar else waiting(f"writing {len(prompts)} texts"):
            outputs = llm.generate(prompts, params, progress=has_bar)
        print(json.dumps([_as_json(output) for output in outputs], ensure_ascii=False)) if arguments.json else _print_all(
            outputs
        )
        return 0
    shown = texts[0] + ("\n\n" if arguments.chat else "")
    output = _stream(llm, prompts[0], shown, params, show=arguments.show)
    print(dim(_stats_line(llm.method_name, [output])), file=sys.stderr)
    return 0


def _on_ray(arguments: argparse.Namespace, texts: list[str]) -> int:
    if arguments.out is None:
        raise OptionError("--ray writes its answers to a file, so that it can be resumed; name it with --out FILE")
    if arguments.num_beams > 1 or arguments.compare:
        raise OptionError("--num-beams and --compare work in one process only; leave them out, or leave --ray out")
    arguments.job_seed = job_seed(arguments, arguments.out)
    left_out = (
        "prompt",
        "file",
        "lines",
        "out",
        "show",
        "json",
        "ray",
        "workers",
        "worker_gpus",
        "ray_address",
        "batch_size",
    )
    settings = settings_of(arguments, [name for name in sorted(vars(arguments)) if name not in left_out])
    count = run_job(arguments, texts, partial(AnswerWriter, arguments), arguments.out, settings)
    print(f"{arguments.out}: {count} answers")
    return 0


def _beams(llm: LLM, prompts: list[Any], params: SamplingParams, arguments: argparse.Namespace) -> int:
    if replace(params, stop=tuple(params.stop)) != SamplingParams(max_tokens=params.max_tokens):
        raise RequestError(
            "beam search takes --max-tokens and no other sampling option; leave them out, or leave out --num-beams"
        )
    options = BeamOptions(arguments.num_beams, params.max_tokens, arguments.length_penalty, STOPPING[arguments.early_stopping])
    with waiting(f"searching with {options.num_beams} beams"):
        found = llm.beam_search(prompts, options)
    if arguments.json:
        print(json.dumps([[asdict(beam) for beam in beams] for beams in found], ensure_ascii=False))
        return 0
    for beams in found:
        for beam in beams:
            print(f"{beam.score:>9.4f}  {beam.text!r}")
        print(dim(f"{beams[0].num_levels} levels in {beams[0].num_passes} target passes"), file=sys.stderr)
    return 0


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    if arguments.file is not None:
        if not arguments.file.is_file():
            raise RequestError(f"prompt file {arguments.file} does not exist; check the path")
        text = arguments.file.read_text(encoding="utf-8", errors="replace")
    elif arguments.prompt is None or arguments.prompt == "-":
        text = sys.stdin.read()
    else:
        return [arguments.prompt]
    prompts = [line for line in text.splitlines() if line.strip()] if arguments.lines else [text.rstrip("\n")]
    if not any(prompts):
        raise RequestError("the prompt is empty; give text as an argument, with --file, or on standard input")
    return prompts


def _stream(llm: LLM, prompt: str | list[int], text: str, params: SamplingParams, *, show: bool) -> RequestOutput:
    """Print the text as it is generated."""
    painter = _Painter(llm, prompt)
    last: RequestOutput | None = None
    for number, chunk in enumerate(first_explained(llm.stream(prompt, params), "reading the prompt")):
        if number == 0:  # not before the request was found to be valid
            print(bold(text), end="")
        print(painter.paint(chunk.token_ids, chunk.origins) if show else chunk.text, end="", flush=True)
        last = chunk.output or last
    print(f"\n{legend()}" if show and can_colour() else "")
    assert last is not None
    return last


class _Painter:
    """Colours tokens as they arrive. A character made of several tokens has the colour of the last one."""

    def __init__(self, llm: LLM, prompt: str | list[int]) -> None:
        ids = llm.codec.encode(prompt) if isinstance(prompt, str) else prompt
        self.stream = llm.codec.new_stream(ids)()

    def paint(self, tokens: Sequence[int], origins: Sequence[Origin]) -> str:
        return "".join(coloured(self.stream.push(token), origin) for token, origin in zip(tokens, origins, strict=True))


@dataclass(frozen=True)
class Comparison:
    """Plain and speculative runs of the same requests."""

    plain: list[RequestOutput]
    fast: list[RequestOutput]
    plain_speed: float
    fast_speed: float
    idle: Idle | None
    """Why a text has no guesses: the reason of its last round."""

    @property
    def identical(self) -> bool:
        return [o.token_ids for o in self.plain] == [o.token_ids for o in self.fast]

    @property
    def speedup(self) -> float:
        return self.fast_speed / self.plain_speed

    def verdict(self, device: str) -> str:
        """Whether speculation paid, and if not, why."""
        plain, fast = ([output.stats for output in side] for side in (self.plain, self.fast))
        return verdict(plain, fast, speedup=self.speedup, device=device, identical=self.identical, idle=self.idle)


def measure(llm: LLM, prompts: list[Any], params: SamplingParams) -> Comparison:
    """Median speeds of alternating runs, after one warm-up each."""
    plain_method = llm.compose("plain")
    speeds: dict[str, list[float]] = {"plain": [], "fast": []}
    outputs: dict[str, list[RequestOutput]] = {}
    for repeat in range(_REPEATS + 1):
        for side, method in (("plain", plain_method), ("fast", llm.method)):
            outputs[side], speed = _timed(llm, prompts, params, method)
            if repeat:
                speeds[side].append(speed)
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    idle = None
    if acceptance_of([output.stats for output in outputs["fast"]]) is None:
        again = llm.generate(prompts[:1], params, trace=True)[0]
        reason = again.trace[-1].reason
        idle = None if reason is None else Idle(reason, drafts=acceptance_of([again.stats]) is not None)
    return Comparison(outputs["plain"], outputs["fast"], medians["plain"], medians["fast"], idle)


def _timed(llm: LLM, prompts: list[Any], params: SamplingParams, method: Method) -> tuple[list[RequestOutput], float]:
    """Outputs, and decoding speed in tokens per second without prefill. Rows of a batch share their rounds."""
    outputs = llm.generate(prompts, params, method=method)
    seconds = max(output.stats.seconds for output in outputs)
    return outputs, sum(output.stats.num_tokens for output in outputs) / seconds


def _compare(llm: LLM, texts: list[str], prompts: list[Any], params: SamplingParams, arguments: argparse.Namespace) -> int:
    if params.temperature > 0 and params.seed is None:
        params = replace(params, seed=0)  # two runs can only be compared under one seed
    with waiting(f"comparing {llm.method_name} with plain decoding, {_REPEATS + 1} runs each"):
        result = measure(llm, prompts, params)
    if arguments.json:
        print(json.dumps(_comparison_json(llm, result), ensure_ascii=False))
        return 0
    first = result.fast[0]
    shown = _Painter(llm, prompts[0]).paint(first.token_ids, first.origins) if arguments.show else first.text
    print(bold(texts[0]) + shown + (f"\n\n{legend()}" if arguments.show and can_colour() else "\n"))
    name = llm.method_name
    print(f"{'':<14}{'tokens/s':>10}{'tokens/pass':>13}{'acceptance':>12}")
    for label, speed, outputs in (("plain", result.plain_speed, result.plain), (name, result.fast_speed, result.fast)):
        print(f"{label:<14}{speed:>10.1f}{_per_pass(outputs):>13.2f}{_acceptance(outputs):>12}")
    print(bold(result.verdict("CPU" if llm.target.device.type == "cpu" else "GPU")))
    return 0


def _per_pass(outputs: list[RequestOutput]) -> float:
    return sum(o.stats.num_tokens for o in outputs) / sum(o.stats.num_passes for o in outputs)


def _acceptance(outputs: list[RequestOutput]) -> str:
    return share_text(acceptance_of([output.stats for output in outputs]))


def _stats_line(name: str, outputs: list[RequestOutput]) -> str:
    stats = outputs[0].stats
    return (
        f"{name}: {stats.num_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{_per_pass(outputs):.2f} tokens per target pass, acceptance {_acceptance(outputs)}"
    )


def _print_all(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        print(output.text.replace("\n", "\\n"))


def _as_json(output: RequestOutput) -> dict[str, Any]:
    stats = asdict(output.stats)
    stats |= {"tokens_per_second": output.stats.tokens_per_second, "tokens_per_pass": output.stats.tokens_per_pass}
    stats["acceptance"] = acceptance_of([output.stats])
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "origins": [origin.value for origin in output.origins],
        "seed": output.seed,
        "is_invariant": output.is_invariant,
        "stats": stats,
    }


def _comparison_json(llm: LLM, result: Comparison) -> dict[str, Any]:
    return {
        "method": llm.method_name,
        "identical": result.identical,
        "speedup": result.speedup,
        "verdict": result.verdict("CPU" if llm.target.device.type == "cpu" else "GPU"),
        "plain": {"tokens_per_second": result.plain_speed, "outputs": [_as_json(o) for o in result.plain]},
        "fast": {"tokens_per_second": result.fast_speed, "outputs": [_as_json(o) for o in result.fast]},
    }
