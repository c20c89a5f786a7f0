"""``outrider analyse MODEL``: how much its hidden states know about tokens beyond the next, before anybody trains heads.

outrider analyse                              the bundled target
outrider analyse MODEL --offsets 4 --texts 200
"""

from __future__ import annotations

import argparse
import json

from outrider.api import LLM
from outrider.bench.session import Bench, encode_suites
from outrider.bench.suites import load_suites
from outrider.bench.surplus.analysis import analyse, table
from outrider.bench.surplus.probe import ProbeOptions
from outrider.bench.surplus.texts import own_texts, readout_of, sample_of
from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("analyse", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub name or .gguf file (default: the bundled target)")
    parser.add_argument("--offsets", type=int, default=3, help="tokens beyond the next that are probed")
    parser.add_argument("--texts", type=int, default=200, help="texts that the target writes for the probes")
    parser.add_argument("--max-tokens", "-n", type=int, default=96, help="tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the texts")
    parser.add_argument("--suites", default="stories,chat", help="prompts, by the names of `outrider bench` or as files")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a probe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for name in ("offsets", "texts", "max_tokens", "steps"):
        least = 5 if name == "texts" else 1
        given = vars(arguments)[name]
        if given < least:
            raise OptionError(f"--{name.replace('_', '-')} {given} is not valid; use at least {least}")
    name = arguments.model or bundled_path("target")
    readout = readout_of(name)
    llm = LLM(name, method="plain")
    bench = Bench(suites=load_suites(arguments.suites.split(",")), num_prompts=None)
    prompts = [prompt[-64:] for many in encode_suites(llm, bench).values() for prompt in many]
    with waiting("writing texts"):
        texts = own_texts(
            llm, prompts, num_texts=arguments.texts, num_tokens=arguments.max_tokens, temperature=arguments.temperature
        )
        samples = [sample_of(llm.target, text) for text in texts]
    with waiting("training probes"):
        found = analyse(samples, readout, num_offsets=arguments.offsets, options=ProbeOptions(num_steps=arguments.steps))
    print(json.dumps(found.to_json()) if arguments.json else table(found))
    return 0
