"""``outrider export``: writes draft heads in the format of another engine, or draft models and heads as GGUF for llama.cpp.

outrider export HEADS vllm                          a folder that vLLM reads
outrider export DRAFT gguf --out draft.gguf         for llama-server --model-draft draft.gguf
outrider export HEADS gguf --target MODEL           EAGLE-3 and DFlash, for --spec-type draft-eagle3 and draft-dflash
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.models.export_formats import FORMATS, GGUF


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the heads, or the draft model")
    parser.add_argument(
        "format", metavar="FORMAT", help=f"one of {', '.join(FORMATS)} for heads; {GGUF} for draft models and heads"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to write (default: DIR-FORMAT, or DIR.gguf)")
    parser.add_argument("--target", metavar="MODEL", help="the target, where the heads leave parts to it")
    parser.add_argument("--dtype", default="float16", help="type of a GGUF file's matrices: float32, float16 or bfloat16")
