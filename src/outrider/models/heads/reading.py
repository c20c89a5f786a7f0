"""The configuration of trained heads, read from the ``config.json`` of their folder.

``config.json`` is the plain format that other engines read. EAGLE-1 and EAGLE-3 have a Llama config of one layer; Medusa and
the MLP speculator have their own. We add one block, ``outrider``: the kind, the tapped layers, and what identifies the target.
A public checkpoint without the block is understood where its architecture leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ModelError
from outrider.models.config import config_of
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.kind import HeadKind, first_of
from outrider.models.heads.kinds import kind_of

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")


TARGET_FOLDER_KEYS = ("target_folder", "ends")
"""Keys of our block that hold the path of the target's folder. Folders of earlier versions have the second one."""


def target_folder_of(raw: Mapping[str, Any]) -> str | None:
    """Folder of the target, relative to the heads' own folder; None for heads that hold all their tensors."""
    own: Mapping[str, Any] = raw.get("outrider") or {}
    return next((own[key] for key in TARGET_FOLDER_KEYS if own.get(key)), None)


def head_config(raw: Mapping[str, Any], *, origin: str, num_layers: int = 0) -> HeadConfig:
    """The head config in a ``config.json``. ``num_layers`` is the target's, for public folders that leave the layers to it."""
    kind = kind_of(raw, origin=origin)
    try:
        config = _read(raw, kind, num_layers)
    except ModelError as error:
        raise ModelError(f"{origin}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{origin}: config.json has no valid {error}; fetch the heads again") from error
    if kind.num_taps > 1 and len(config.taps) == 1:
        raise ModelError(f"{origin}: {kind.name} reads three layers of the target, and taps = {list(config.taps)}; name three")
    if (config.target_layers + 1 in config.taps) != kind.reads_cache and config.taps:
        raise ModelError(f"{origin}: taps = {list(config.taps)} are not what {kind.name} heads read; leave them out")
    return config


def _read(raw: Mapping[str, Any], kind: HeadKind[Any], num_layers: int) -> HeadConfig:
    own: Mapping[str, Any] = raw.get("outrider") or {}
    if "transformer_layer_config" in raw:  # the speculators format nests the layer
        raw = {**raw["transformer_layer_config"], **{k: v for k, v in raw.items() if k != "transformer_layer_config"}}
    raw = kind.read_keys(raw)
    has_layer = kind.has_layer or bool(own.get("prefix"))
    layer_keys = {**raw, "model_type": raw.get("layer_type", kind.layer_type), "num_hidden_layers": 1}
    layers = int(own.get("target_layers") or num_layers)
    taps = own.get("taps") or raw.get("eagle_aux_hidden_state_layer_ids") or (kind.default_taps(layers) if layers else ())
    return HeadConfig(
        kind=kind.name,
        hidden_size=int(raw["emb_dim"] if "emb_dim" in raw else raw["hidden_size"]),
        vocab_size=int(raw["vocab_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
        taps=tuple(int(tap) for tap in taps),
        target_layers=layers or max(taps, default=0),
        num_depths=kind.num_depths(raw),
        num_blocks=int(own.get("num_blocks") or raw.get("medusa_num_layers") or raw.get("num_draft_layers") or 1),
        own_readouts=bool(own.get("own_readouts", True)),
        prefix=bool(own.get("prefix", False)),
        layer=config_of(layer_keys) if has_layer else None,
        num_layers=int(own.get("num_layers") or raw.get("num_hidden_layers") or 1) if kind.is_stack else 1,
        inner_size=int(raw.get("inner_dim") or raw.get("exit_dim") or 0),
        tie_stages=bool(raw.get("tie_weights", False)),
        scale_input=bool(raw.get("scale_input", False)),
        stride=int(own.get("stride", 1)),
        mask_token=int(first_of(raw, _MASKS) or 0),
        norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        tied=bool(own.get("tied", False)),
        signature=tuple(own.get("signature", ())),
        raw=dict(raw),
    )
