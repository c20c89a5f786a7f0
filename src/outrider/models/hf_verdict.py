"""The verdict on a transformers model, kept on disk: what ``hf_check.py`` tried is tried once for each model.

A verdict belongs to a configuration, the context it is opened for, and the type of its numbers. It also belongs to the versions
of torch and transformers, and to the code of the model and of the checks. It does not depend on weights, because the checks
only concern how an architecture places and masks tokens. A model passed in memory may have been changed by its owner, so it is
tried every time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.core.kept_json import keep_json, read_json
from outrider.models.native.compiler import cache_folder

_CODE = ("hf.py", "hf_cache.py", "hf_check.py", "hf_verdict.py")


@dataclass(frozen=True)
class TextPromise:
    """What the adapter can promise of a model."""

    max_len: int
    """Longest usable context."""
    refused: str | None = None
    """Why it cannot be used at all."""
    capped: str | None = None
    """Why ``max_len`` is less than asked for."""


def kept_verdict(raw: Any, max_len: int, find: Callable[[], TextPromise]) -> TextPromise:
    """The verdict from the cache folder, or from ``find``. ``raw`` is the transformers model."""
    path = verdict_path(raw, max_len)
    known = read_json(path)
    if isinstance(known, dict) and known.keys() == {item.name for item in fields(TextPromise)}:
        return TextPromise(**known)
    verdict = find()
    keep_json(path, asdict(verdict))
    return verdict


def verdict_path(raw: Any, max_len: int) -> Path:
    """The file of a model's verdict."""
    digest = hashlib.sha256()
    for name in _CODE:
        digest.update(Path(__file__).with_name(name).read_bytes())
    digest.update(Path(inspect.getfile(type(raw))).read_bytes())  # code that came with the checkpoint has no version
    facts = [torch.__version__, transformers.__version__, str(raw.dtype), raw.device.type, max_len]
    config = {name: value for name, value in raw.config.to_dict().items() if name != "_name_or_path"}
    digest.update(json.dumps([type(raw).__name__, facts, config], sort_keys=True, default=str).encode())
    return cache_folder() / f"adapter-{digest.hexdigest()[:20]}.json"
