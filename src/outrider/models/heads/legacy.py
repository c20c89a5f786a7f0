"""Names of tensors in public checkpoints -> ours. Ours are the plain format's own, so this is short.

EAGLE-3 folders write ``midlayer.*`` or ``layers.0.*``; some carry a ``model.`` prefix. Medusa's first releases wrote
``{head}.{layer}.linear.weight`` and ``{head}.{last}.weight``, with or without ``medusa_heads.`` before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MEDUSA = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)(\.linear)?\.(weight|bias)")
_UNUSED = ("rotary_emb.inv_freq",)


def legacy_names(names: Iterable[str], kind: str) -> dict[str, str]:
    """Our name -> the name in the file, for every tensor that counts."""
    return {_ours(name, kind): name for name in names if not name.endswith(_UNUSED)}


def _ours(name: str, kind: str) -> str:
    name = name.removeprefix("model.")
    if kind == "eagle3" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    match = _MEDUSA.fullmatch(name) if kind == "medusa" else None
    if match is None:
        return name
    head, layer, linear, part = match.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"
