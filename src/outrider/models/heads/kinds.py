"""All kinds of heads by name. A kind's own file says everything else about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ModelError, nearest
from outrider.models.heads import (
    dflash,
    eagle1,
    eagle3,
    hydra,
    l_mtp,
    medusa,
    mlp_speculator,
    mtp,
    mtp_parallel,
    p_eagle,
    redrafter,
)
from outrider.models.heads.kind import HeadKind

KINDS: Mapping[str, HeadKind[Any]] = {
    "medusa": medusa.KIND,
    "hydra": hydra.KIND,
    "eagle1": eagle1.KIND,
    "eagle3": eagle3.KIND,
    "mlp-speculator": mlp_speculator.KIND,
    "redrafter": redrafter.KIND,
    "mtp": mtp.KIND,
    "mtp-parallel": mtp_parallel.KIND,
    "l-mtp": l_mtp.KIND,
    "p-eagle": p_eagle.KIND,
    "dflash": dflash.KIND,
}
HEAD_KINDS = tuple(KINDS)


def kind_of(raw: Mapping[str, Any], *, origin: str) -> HeadKind[Any]:
    """The kind that a ``config.json`` describes: by our own block, by its architecture, or by its model type."""
    own = (raw.get("outrider") or {}).get("kind")
    if own is not None:
        if own not in KINDS:
            raise ModelError(f"{origin}: heads of kind {own!r} are not known; {nearest(own, HEAD_KINDS)}")
        return KINDS[own]
    by_type = {kind.model_type: kind for kind in KINDS.values() if kind.model_type != "llama"}
    found = next((kind for kind in KINDS.values() if kind.claims(raw)), by_type.get(str(raw.get("model_type"))))
    if found is None:
        names = ", ".join(raw.get("architectures") or ()) or "nothing known"
        known = [name for kind in KINDS.values() for name in kind.architectures]
        raise ModelError(
            f"{origin}: config.json describes {names}, which are no draft heads; {nearest(str(raw.get('model_type')), known)}"
        )
    return found
