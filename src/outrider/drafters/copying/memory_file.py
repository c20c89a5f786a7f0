"""The file of a drafter's memory: named numpy arrays and a JSON header, with a version and a checksum.

It is a plain ``.npz`` archive that numpy can open by itself and that holds no code. It is written under a temporary name and
then renamed, so a reader never sees half a file. A damaged file is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.errors import ModelError

_HEADER = "header"


def write_memory(path: str | Path, kind: str, *, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` and ``header``; ``kind`` names the memory and its version, as in "ngram-cache 1"."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ModelError(f"folder {path.parent} does not exist; make it first, or save to another place")
    text = json.dumps({**header, "kind": kind, "sha256": _digest(arrays)}, sort_keys=True)
    contents: dict[str, Any] = {_HEADER: np.frombuffer(text.encode(), np.uint8), **arrays}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **contents)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_memory(path: str | Path, kind: str, *, vocab_size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a file written by ``write_memory`` with the same kind, for the same vocabulary."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"memory file {path} does not exist; save one first, or leave the option out")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop(_HEADER).tobytes().decode())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ModelError(f"memory file {path} cannot be read: {_first_line(error)}; delete it and save it again") from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        found = header.get("kind") if isinstance(header, dict) else None
        raise ModelError(
            f"memory file {path} holds {found!r} and {kind!r} is needed; use a file of the same method and version"
        )
    if header.get("sha256") != _digest(arrays):
        raise ModelError(f"memory file {path} is damaged: its checksum does not match; delete it and save it again")
    if header.get("vocab_size") != vocab_size:
        raise ModelError(
            f"memory file {path} was learned with a vocabulary of {header.get('vocab_size')} tokens and the model has "
            f"{vocab_size}; use a memory of the same model family"
        )
    return header, arrays


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
