"""Runs ``outrider trim``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.bundled import bundled_path
from outrider.cli.progress import waiting
from outrider.codecs.load import load_codec
from outrider.models.heads import load_head, save_head
from outrider.models.heads.kinds import KINDS
from outrider.models.heads.trim import trimmed
from outrider.models.load import read_config
from outrider.models.reduced import trim_model
from outrider.models.source import local_path
from outrider.train.data import read_documents
from outrider.train.vocabulary import ChosenTokens, commonest

_ENDS = ("bos_token_id", "eos_token_id")


def run(arguments: argparse.Namespace) -> int:
    folder = local_path(arguments.folder)
    raw = read_config(folder)
    is_head = bool(raw.get("outrider")) or any(kind.claims(raw) for kind in KINDS.values())
    target = (arguments.target or bundled_path("target")) if is_head else str(folder)
    with waiting("counting the tokens of the data"):
        documents = read_documents(arguments.data, load_codec(target), max_len=1 << 20, min_len=1)
    spoken = commonest(documents, arguments.tokens, int(raw["vocab_size"]), always=_ends(raw))
    out = arguments.out or folder.with_name(f"{folder.name}-{arguments.tokens}")
    notes = {"from": folder.name, "data": [file.name for file in arguments.data], "coverage": spoken.coverage}
    with waiting(f"writing {out}"):
        if is_head:
            save_head(trimmed(load_head(folder, ends=target), spoken.ids), out, notes=notes)
        else:
            trim_model(folder, raw, spoken.ids, out, notes)
    print(_summary(out, spoken, raw))
    return 0


def _summary(out: Path, spoken: ChosenTokens, raw: Mapping[str, Any]) -> str:
    return f"{out}: {len(spoken.ids)} of {raw['vocab_size']} tokens, which write {100 * spoken.coverage:.2f} % of the data"


def _ends(raw: Mapping[str, Any]) -> list[int]:
    """Tokens that begin and end texts. A draft needs them, however rare they are."""
    found = (raw.get(name) for name in _ENDS)
    return sorted({token for value in found if value is not None for token in (value if isinstance(value, list) else [value])})
