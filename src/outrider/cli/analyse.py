"""Runs ``outrider analyse``: probes on the hidden states of texts that the target wrote."""

from __future__ import annotations

import argparse
import json

from outrider.api import LLM
from outrider.bench.provenance import model_name, results_head
from outrider.bench.session import Bench, encode_suites
from outrider.bench.suites import load_suites
from outrider.bench.surplus.analysis import analyse, table
from outrider.bench.surplus.probe import ProbeOptions
from outrider.bench.surplus.texts import own_texts, readout_of, sample_of
from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError


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
    if arguments.out:
        what = f"what hidden states know beyond the next token, {model_name(name)}"
        arguments.out.write_text(json.dumps({**results_head(what), **found.to_json(), "rows": found.rows()}, indent=1) + "\n")
    print(json.dumps(found.to_json()) if arguments.json else table(found))
    return 0
