"""The rows of trained heads for the table in ``methods.py``: every one is a folder of heads, checked against the target it
is used with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.core.errors import ModelError
from outrider.core.interfaces import Drafter
from outrider.core.table import MethodRow, Parts
from outrider.drafters.heads.block_parallel import BlockDrafting, ParallelPrediction
from outrider.drafters.heads.dflash import Dflash
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_tree import HeadOptions
from outrider.drafters.heads.hydra import Hydra
from outrider.drafters.heads.l_mtp import Leap
from outrider.drafters.heads.medusa import Medusa
from outrider.drafters.heads.mtp import Mtp
from outrider.drafters.heads.recurrent import MlpSpeculation, Redrafter
from outrider.models.heads import load_head
from outrider.models.heads.frozen import quicken


def _builder(kind: str, drafter: Callable[..., Drafter]) -> Callable[[Parts], Drafter]:
    def build(parts: Parts) -> Drafter:
        head = load_head(parts.options.heads, parts.target, ends=parts.options.ends)
        if head.config.kind != kind:
            found = head.config.kind
            raise ModelError(f"{parts.options.heads} holds {found} heads and the method is {kind!r}; use method {found!r}")
        return drafter(quicken(head), parts.options, draws=parts.draws)

    return build


_SHARED: dict[str, Any] = {"options": HeadOptions, "needs": ("heads",)}

HEAD_ROWS: dict[str, MethodRow] = {
    "medusa": MethodRow(
        summary="heads on the target's last state guess the next tokens at once (trained)",
        paper="Cai et al. 2024, Medusa (arXiv 2401.10774)",
        drafter=Medusa,
        build=_builder("medusa", Medusa),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "hydra": MethodRow(
        summary="heads that read each other's guesses (trained)",
        paper="Ankner et al. 2024, Hydra (arXiv 2402.05109)",
        drafter=Hydra,
        build=_builder("hydra", Hydra),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "eagle1": MethodRow(
        summary="a layer that predicts the target's features, token by token (trained)",
        paper="Li et al. 2024, EAGLE (arXiv 2401.15077), EAGLE-2's trees (arXiv 2406.16858)",
        drafter=Eagle,
        build=_builder("eagle1", Eagle),
        defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "eagle3": MethodRow(
        summary="a layer on three layers of the target, trained on its own drafts (trained)",
        paper="Li et al. 2025, EAGLE-3 (arXiv 2503.01840)",
        drafter=Eagle,
        build=_builder("eagle3", Eagle),
        defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "mlp-speculator": MethodRow(
        summary="a small state that takes in the guesses one by one, a stage per guess (trained)",
        paper="Wertheimer et al. 2024 (arXiv 2404.19124), IBM's Foundation Model Stack",
        drafter=MlpSpeculation,
        build=_builder("mlp-speculator", MlpSpeculation),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "redrafter": MethodRow(
        summary="a recurrent cell beside the target's state, searched by beams (trained)",
        paper="Zhang et al. 2024, ReDrafter (arXiv 2403.09919)",
        drafter=Redrafter,
        build=_builder("redrafter", Redrafter),
        defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "mtp": MethodRow(
        summary="a chain of one-layer modules, each a token further (trained)",
        paper="DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437)",
        drafter=Mtp,
        build=_builder("mtp", Mtp),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "mtp-parallel": MethodRow(
        summary="a decoder layer for each of the next tokens, all at once (trained)",
        paper="Gloeckle et al. 2024 (arXiv 2404.19737)",
        drafter=ParallelPrediction,
        build=_builder("mtp-parallel", ParallelPrediction),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "l-mtp": MethodRow(
        summary="heads that leap over tokens, asked at the last places together (trained)",
        paper="Liu et al. 2025, L-MTP (arXiv 2505.17505)",
        drafter=Leap,
        build=_builder("l-mtp", Leap),
        defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "p-eagle": MethodRow(
        summary="EAGLE-3's layers draft a block in one pass, from places held open (trained)",
        paper="Hui et al. 2026, P-EAGLE (arXiv 2602.01469)",
        drafter=BlockDrafting,
        build=_builder("p-eagle", BlockDrafting),
        defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
        **_SHARED,
    ),
    "dflash": MethodRow(
        summary="layers over a block of open places, with the target's features as keys and values (trained)",
        paper="Chen et al. 2026, DFlash (arXiv 2602.06036)",
        drafter=Dflash,
        build=_builder("dflash", Dflash),
        defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
        **_SHARED,
    ),
}
