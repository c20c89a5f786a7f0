"""Options that several commands share: which model, which method, how to sample, how to spread the work."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_model_options(parser: argparse.ArgumentParser, *, model_action: str = "store") -> None:
    """``model_action`` "append" lets ``--model`` be repeated, for commands that run several models."""
    group = parser.add_argument_group("model and method")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="settings that `outrider tune` wrote; other options override them"
    )
    group.add_argument(
        "--model", metavar="NAME", action=model_action, help="folder, hub name or .gguf file (default: the bundled model)"
    )
    group.add_argument(
        "--draft",
        action="append",
        metavar="NAME",
        help="draft model, repeatable (default: the one of the bundled model, and none for others)",
    )
    group.add_argument("--method", metavar="NAME", help="how guesses are made: a name of `outrider methods`")
    group.add_argument(
        "--acceptance", metavar="RULE", help="which guesses are kept: a rule of `outrider methods` (default: the method's own)"
    )
    group.add_argument("--policy", metavar="NAME", help="how the draft length is chosen (default: adaptive, or fixed with -K)")
    group.add_argument("--num-draft-tokens", "-K", type=int, metavar="K", help="guesses per round")
    group.add_argument("--reference", action="append", default=[], metavar="FILE", help="a document to copy from (repeatable)")
    group.add_argument(
        "--option", "-O", action="append", default=[], metavar="NAME=VALUE", help="any other option of the method"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16, float16, int8, int4, w8a8, stored or stored-exact (see docs/quantised.md)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    group.add_argument("--numerics", default="auto", help="on a GPU: invariant (bit for bit plain decoding's text) or fast")
    add_key_storage(group)
    group.add_argument("--max-len", type=int, metavar="N", help="longest context in tokens (default: the model's own)")
    text = "divide the model among N processes, each with a GPU of its own where there are enough"
    group.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help=text)
    text = "give the draft model a process of its own (for pearl, and for -O beside=1)"
    group.add_argument("--draft-process", action="store_true", help=text)
    text = "spread the draft model's layers over N processes and run them at the same time (EasySpec)"
    group.add_argument("--draft-parallel", type=int, default=1, metavar="N", help=text)
    group.add_argument("--draft-dtype", metavar="DTYPE", help="type of draft models, if it differs from the target's")
    text = "LOSSY: read only this share of every prompt, which the draft model chooses (default: 1, the whole prompt)"
    group.add_argument("--keep-prompt", type=float, default=1.0, metavar="SHARE", help=text)
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the hub")
    group.add_argument("--trust-remote-code", action="store_true", help="let a checkpoint run Python code of its own")
    group.add_argument("--no-fast", dest="fast", action="store_false", help="run the plain PyTorch decoder")


def add_key_storage(group: argparse._ActionsContainer) -> None:
    """The type in which a cache stores keys and values."""
    text = "store keys and values in fp8 or int8: half the memory per token, and scores change a little (default: auto)"
    group.add_argument("--kv-cache", default="auto", metavar="TYPE", help=text)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", "-n", type=int, default=128, help="most tokens to generate")
    group.add_argument("--temperature", "-t", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    group.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 uses all")
    group.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens whose probabilities reach this sum"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens with less than this share of the largest probability"
    )
    group.add_argument(
        "--typical-p", type=float, default=1.0, help="sample from the most typical tokens whose probabilities reach this sum"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="repetition penalty over prompt and output; above 1 repeats less"
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="presence penalty, subtracted once from the logits of tokens in the output",
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="frequency penalty, subtracted from a token's logit per occurrence"
    )
    group.add_argument("--min-tokens", type=int, default=0, help="fewest tokens to generate")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--seed", type=int, help="the same seed gives the same text")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", type=Path, help="constrain the text to JSON of this schema")
    grammar.add_argument("--regex", metavar="PATTERN", help="constrain the text to this regular expression")
    grammar.add_argument("--ebnf", metavar="FILE", type=Path, help="constrain the text to this grammar (Lark or GBNF notation)")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")


def add_ray(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of a job on Ray, and give their group."""
    group = parser.add_argument_group("many prompts on Ray Data (pip install 'outrider[ray]')")
    group.add_argument("--ray", action="store_true", help="spread the prompts over workers; a killed job can be resumed")
    group.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes, each with the model loaded")
    group.add_argument("--worker-gpus", type=float, default=0.0, metavar="N", help="GPUs of a worker")
    group.add_argument("--shard-size", type=int, default=32, metavar="N", help="prompts between two checkpoints of the job")
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="address of a Ray cluster to join, for example 'auto' (default: start Ray on this machine)",
    )
    return group


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a fleet."""
    group = parser.add_argument_group("replicas (pip install 'outrider[ray]')")
    text = "run N engines on Ray Serve behind this address; LEAST:MOST lets their number follow the load"
    group.add_argument("--replicas", metavar="N", help=text)
    text = "where requests go. prefix: to the replica that has read their prefix; random: to the less busy of two"
    group.add_argument("--routing", choices=["prefix", "random"], default="prefix", help=text)
    text = "with LEAST:MOST: requests that fill a replica, until its measured goodput gives the number"
    group.add_argument("--target-requests", type=float, default=8.0, metavar="N", help=text)
    group.add_argument("--replica-cpus", type=float, metavar="N", help="cores of a replica (default: an equal share)")
    group.add_argument("--replica-gpus", type=float, default=0.0, metavar="N", help="GPUs of a replica")
    text = "address of a Ray cluster to join, for example 'auto' (default: start Ray on this machine)"
    group.add_argument("--ray-address", metavar="ADDRESS", help=text)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the flags that go with a repeated ``--model``."""
    group = parser.add_argument_group("several models")
    text = "LoRA adapter of the first model, a folder in PEFT's layout, served as a model of this name (repeatable)"
    group.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER", help=text)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for loading models."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="NAME", help="folder, hub name or .gguf file (default: the bundled pair)")
    group.add_argument(
        "--draft", action="append", metavar="NAME", help="draft model or 'bundled', repeatable; may have a tokenizer of its own"
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    add_key_storage(group)
    group.add_argument("--threads", type=int, help="CPU threads (default: as torch chooses)")
