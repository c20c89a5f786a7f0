"""All kinds of heads by name. A kind's own file says everything else about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ModelError, nearest
from outrider.models.heads.chimera import KIND as CHIMERA
from outrider.models.heads.dflash import KIND as DFLASH
from outrider.models.heads.dspark import KIND as DSPARK
from outrider.models.heads.eagle1 import KIND as EAGLE1
from outrider.models.heads.eagle3 import KIND as EAGLE3
from outrider.models.heads.falcon import KIND as FALCON
from outrider.models.heads.fspad import KIND as FSPAD
from outrider.models.heads.hydra import KIND as HYDRA
from outrider.models.heads.kind import HeadKind
from outrider.models.heads.l_mtp import KIND as L_MTP
from outrider.models.heads.longspec import KIND as LONGSPEC
from outrider.models.heads.medusa import KIND as MEDUSA
from outrider.models.heads.mlp_speculator import KIND as MLP_SPECULATOR
from outrider.models.heads.msd import KIND as MSD
from outrider.models.heads.mtp import KIND as MTP
from outrider.models.heads.mtp_parallel import KIND as MTP_PARALLEL
from outrider.models.heads.p_eagle import KIND as P_EAGLE
from outrider.models.heads.redrafter import KIND as REDRAFTER
from outrider.models.heads.specvlm import KIND as SPECVLM
from outrider.models.heads.vispec import KIND as VISPEC

_ALL: tuple[HeadKind[Any], ...] = (
    MEDUSA,
    HYDRA,
    EAGLE1,
    EAGLE3,
    FSPAD,
    FALCON,
    CHIMERA,
    MLP_SPECULATOR,
    REDRAFTER,
    MTP,
    MTP_PARALLEL,
    L_MTP,
    P_EAGLE,
    DFLASH,
    DSPARK,
    LONGSPEC,
    MSD,
    VISPEC,
    SPECVLM,
)
KINDS: Mapping[str, HeadKind[Any]] = {kind.name: kind for kind in _ALL}
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
