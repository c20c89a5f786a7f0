"""Runs ``outrider export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cli.progress import waiting
from outrider.core.errors import OptionError
from outrider.models.export_formats import GGUF
from outrider.models.gguf.export import export_gguf
from outrider.models.gguf.heads import export_head_gguf, is_heads
from outrider.models.heads import load_head
from outrider.models.heads.export import export_head
from outrider.models.heads.reading import target_folder_of
from outrider.models.load import read_config
from outrider.models.source import Source, local_path


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    with waiting(f"converting {folder}"):
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
    """Export a draft model, or heads with their target's tokenizer."""
    raw = read_config(folder)
    if not is_heads(raw):
        export_gguf(folder, out, raw=raw, dtype=arguments.dtype)
        return
    shared = target_folder_of(raw)
    target = arguments.target or (str((folder / shared).resolve()) if shared else None)
    if target is None:
        raise OptionError("a GGUF file of heads holds the target's tokenizer; name the target with --target MODEL")
    export_head_gguf(load_head(folder, ends=target), out, target=local_path(Source(target)), dtype=arguments.dtype)
