"""Runs ``outrider prune``."""

from __future__ import annotations

import argparse

import torch

from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.codecs.load import load_codec
from outrider.train.data import read_documents
from outrider.train.draft_lm import DraftLM
from outrider.train.prune import best, importance_of, pruned


def run(arguments: argparse.Namespace) -> int:
    name = arguments.model or bundled_path("target")
    with waiting(f"loading {name}"):
        model = DraftLM.load(name, torch.device("cpu"))
    max_len = min(arguments.max_len, model.config.max_len)
    documents = read_documents(arguments.data, load_codec(name), max_len=max_len)[: arguments.texts]
    with waiting(f"reading {len(documents)} texts"):
        importance = importance_of(model, documents)
    mlp_size = model.config.mlp_size if arguments.mlp is None else arguments.mlp
    draft = pruned(model, importance, num_layers=arguments.layers, mlp_size=mlp_size)
    layers = best(importance.layers, arguments.layers)
    notes = {"from": str(name), "data": [file.name for file in arguments.data], "layers": layers, "mlp": mlp_size}
    draft.save(arguments.out, notes)
    sizes = [sum(parameter.numel() for parameter in one.parameters()) / 1e6 for one in (model, draft)]
    print(f"{arguments.out}: layers {', '.join(map(str, layers))}, {sizes[1]:.2f} of {sizes[0]:.2f} million numbers")
    print(f"  next: outrider train distill --target {name} --draft {arguments.out} --data TEXTS --out DIR")
    return 0
