"""``outrider export``: writes draft heads in the format of another engine, or draft models and heads as GGUF for llama.cpp.

outrider export HEADS vllm                          a folder that vLLM reads
outrider export DRAFT gguf --out draft.gguf         for llama-server --model-draft draft.gguf
outrider export HEADS gguf --target MODEL           EAGLE-3 and DFlash, for --spec-type draft-eagle3 and draft-dflash
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.core.errors import OptionError
from outrider.models.gguf.export import TYPES, export_gguf
from outrider.models.gguf.heads import export_head_gguf, is_heads
from outrider.models.heads import load_head
from outrider.models.heads.export import FORMATS, export_head
from outrider.models.load import read_config
from outrider.models.source import Source, local_path

GGUF = "gguf"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the heads, or the draft model")
    parser.add_argument(
        "format", metavar="FORMAT", help=f"one of {', '.join(FORMATS)} for heads; {GGUF} for draft models and heads"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to write (default: DIR-FORMAT, or DIR.gguf)")
    parser.add_argument("--target", metavar="MODEL", help="the target, where the heads leave parts to it")
    parser.add_argument("--dtype", default="float16", help=f"of a GGUF file's matrices: {', '.join(TYPES)} (default: float16)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.format == GGUF:
        out = arguments.out or folder.with_name(f"{folder.name}.gguf")
        _export_gguf(folder, out, arguments)
    else:
        out = arguments.out or folder.with_name(f"{folder.name}-{arguments.format}")
        head = load_head(folder, ends=arguments.target)
        export_head(head, out, form=arguments.format, target_name=arguments.target or "target")
    print(out)
    return 0


def _export_gguf(folder: Path, out: Path, arguments: argparse.Namespace) -> None:
    """A draft model, or heads: the latter with the tokenizer of their target."""
    raw = read_config(folder)
    if not is_heads(raw):
        export_gguf(folder, out, raw=raw, dtype=arguments.dtype)
        return
    shared = raw.get("outrider", {}).get("ends")
    target = arguments.target or (str((folder / shared).resolve()) if shared else None)
    if target is None:
        raise OptionError("a GGUF file of heads holds the target's tokenizer; name the target with --target MODEL")
    export_head_gguf(load_head(folder, ends=target), out, target=local_path(Source(target)), dtype=arguments.dtype)
