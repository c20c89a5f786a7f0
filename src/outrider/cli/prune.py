"""``outrider prune``: a draft model made of parts of a larger one, its layers and MLP units chosen by what they do to text."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.codecs.load import load_codec
from outrider.train.data import read_documents
from outrider.train.draft_lm import DraftLM
from outrider.train.prune import best, importance_of, pruned


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prune", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name (default: the bundled target)")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help=".npy, .jsonl or text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the draft model")
    parser.add_argument("--layers", type=int, required=True, metavar="N", help="how many layers are kept")
    parser.add_argument("--mlp", type=int, metavar="M", help="how many units of every MLP are kept (default: all)")
    parser.add_argument("--texts", type=int, default=32, metavar="N", help="texts of the data that are read")
    parser.add_argument("--max-len", type=int, default=256, help="tokens per text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.model or bundled_path("target")
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
