"""Names of tensors in public checkpoints -> ours. Ours are the plain format's own, so this is short.

EAGLE-3 folders write ``midlayer.*`` or ``layers.0.*``; some carry a ``model.`` prefix. Medusa's first releases wrote
``{head}.{layer}.linear.weight`` and ``{head}.{last}.weight``, with or without ``medusa_heads.`` before it. MLP speculators may
carry a ``speculator.`` prefix and write tied stages once; ReDrafter's output is one sequence, ``lm_head.{layer}.linear.weight``
for the residual blocks and ``lm_head.{last}.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

_MEDUSA = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)(\.linear)?\.(weight|bias)")
_REDRAFTER = re.compile(r"lm_head\.(\d+)(\.linear)?\.(weight|bias)")
_STAGE = re.compile(r"(\w+)\.(\d+)\.(\w+)")
_UNUSED = ("rotary_emb.inv_freq",)


def legacy_names(names: Iterable[str], kind: str) -> dict[str, str]:
    """Our name -> the name in the file, for every tensor that counts."""
    return {_ours(name, kind): name for name in names if not name.endswith(_UNUSED)}


def spread_tied(state: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Every stage of a tied MLP speculator, where the file holds the first one only (for projections: the first two)."""
    found = dict(state)
    for name in wanted:
        match = _STAGE.fullmatch(name)
        if name in found or match is None:
            continue
        part, _, kind = match.groups()
        source = f"{part}.{1 if part == 'proj' else 0}.{kind}"
        if source in found:
            found[name] = found[source]
    return found


def _ours(name: str, kind: str) -> str:
    name = name.removeprefix("model.").removeprefix("speculator.")
    if kind == "eagle3" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    if kind == "p-eagle" and name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    if kind == "redrafter" and (found := _REDRAFTER.fullmatch(name)):
        layer, linear, part = found.groups()
        return f"blocks.layers.{layer}.{part}" if linear else f"lm_head.{part}"
    match = _MEDUSA.fullmatch(name) if kind == "medusa" else None
    if match is None:
        return name
    head, layer, linear, part = match.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"
