"""``outrider export``: writes draft heads in the format of another engine, or a draft model as GGUF for llama.cpp.

outrider export HEADS vllm                          a folder that vLLM reads
outrider export DRAFT gguf --out draft.gguf         for llama-server --model-draft draft.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.models.gguf.export import TYPES, export_gguf
from outrider.models.heads import load_head
from outrider.models.heads.export import FORMATS, export_head
from outrider.models.load import read_config

GGUF = "gguf"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the heads, or the draft model")
    parser.add_argument("format", metavar="FORMAT", help=f"one of {', '.join(FORMATS)} for heads; {GGUF} for a draft model")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to write (default: DIR-FORMAT, or DIR.gguf)")
    parser.add_argument("--target", metavar="MODEL", help="the target, where the heads leave parts to it")
    parser.add_argument("--dtype", default="float16", help=f"of a GGUF file's matrices: {', '.join(TYPES)} (default: float16)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.format == GGUF:
        out = arguments.out or folder.with_name(f"{folder.name}.gguf")
        export_gguf(folder, out, raw=read_config(folder), dtype=arguments.dtype)
    else:
        out = arguments.out or folder.with_name(f"{folder.name}-{arguments.format}")
        head = load_head(folder, ends=arguments.target)
        export_head(head, out, form=arguments.format, target_name=arguments.target or "target")
    print(out)
    return 0
