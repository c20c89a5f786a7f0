"""What a folder of trained heads says about itself.

``config.json`` is the plain format that other engines read (EAGLE-1 and EAGLE-3: a Llama config of one layer; Medusa: its
own), plus one block of ours, ``outrider``: the kind, the tapped layers, and what identifies the target. A public checkpoint
without the block is understood where its architecture leaves no doubt.

    taps: the residual stream entering layer i, and i = L for the last layer's output, as everywhere in this project
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import ModelError, nearest
from outrider.models.config import ModelConfig, config_of

HEAD_KINDS = ("medusa", "hydra", "eagle1", "eagle3")

_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "LlamaForCausalLMEagle": "eagle1",
    "MedusaModel": "medusa",
}


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes and switches of one set of heads."""

    kind: str
    hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Tokens the heads can say."""
    taps: tuple[int, ...]
    target_layers: int
    """0 where a public folder does not say."""
    num_depths: int | None = None
    """Heads, for kinds with one head per depth; None for a head that is applied again and again."""
    num_blocks: int = 1
    """Residual blocks per head."""
    own_readouts: bool = True
    """Every head has an output matrix of its own; else they share one."""
    prefix: bool = False
    """A decoder layer reads the target's states before the heads do (Hydra++)."""
    layer: ModelConfig | None = None
    """The decoder layer, for kinds that have one."""
    norm_eps: float = 1e-5
    tied: bool = False
    """The output matrix is the embedding."""
    signature: tuple[float, ...] = ()
    """What the target's readout says to a fixed state: tells targets of one shape apart."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_layer(self) -> bool:
        return self.layer is not None

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise ModelError(f"heads of kind {self.kind!r} are not known; {nearest(self.kind, HEAD_KINDS)}")
        if not self.taps and not self.target_layers:
            return  # a public folder, read without a target
        bad = next((tap for tap in self.taps if not 0 <= tap <= self.target_layers), None)
        if bad is not None or not self.taps:
            raise ModelError(f"taps = {list(self.taps)} are not layers of a target with {self.target_layers}; write 0 to that")
        if self.kind == "eagle3" and len(self.taps) < 2:
            raise ModelError(f"EAGLE-3 reads several layers of the target and taps = {list(self.taps)}; name three")


def default_taps(kind: str, num_layers: int) -> tuple[int, ...]:
    """Three layers for EAGLE-3 (low, middle, high, as every engine takes them), the last one's output for the others."""
    if kind != "eagle3":
        return (num_layers,)
    low, middle, high = min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)
    return (low, middle, high) if low < middle < high else (0, num_layers // 2, num_layers)


def head_config(raw: Mapping[str, Any], *, origin: str, num_layers: int = 0) -> HeadConfig:
    """The description in a ``config.json``; ``num_layers`` of the target, for public ones that leave the layers to it."""
    own: Mapping[str, Any] = raw.get("outrider") or {}
    kind = own.get("kind") or _kind_of(raw, origin)
    try:
        return _read(raw, own, kind, num_layers)
    except ModelError as error:
        raise ModelError(f"{origin}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{origin}: config.json lacks or garbles {error}; fetch the heads again") from error


def _kind_of(raw: Mapping[str, Any], origin: str) -> str:
    names: Sequence[str] = raw.get("architectures") or ()
    kind = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
    if kind is None and raw.get("model_type") == "medusa":
        kind = "medusa"
    if kind is None:
        raise ModelError(
            f"{origin}: config.json describes {', '.join(names) or 'nothing known'}, which are no draft heads; "
            f"{nearest(str(raw.get('model_type')), _ARCHITECTURES)}"
        )
    return kind


def _read(raw: Mapping[str, Any], own: Mapping[str, Any], kind: str, num_layers: int) -> HeadConfig:
    if "transformer_layer_config" in raw:  # the speculators format nests the layer
        raw = {**raw["transformer_layer_config"], **{k: v for k, v in raw.items() if k != "transformer_layer_config"}}
    has_layer = kind in ("eagle1", "eagle3") or bool(own.get("prefix"))
    layer = config_of({**raw, "model_type": raw.get("layer_type", "llama"), "num_hidden_layers": 1}) if has_layer else None
    layers = int(own.get("target_layers") or num_layers)
    taps = own.get("taps") or raw.get("eagle_aux_hidden_state_layer_ids") or (default_taps(kind, layers) if layers else ())
    return HeadConfig(
        kind=kind,
        hidden_size=int(raw["hidden_size"]),
        vocab_size=int(raw["vocab_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
        taps=tuple(int(tap) for tap in taps),
        target_layers=layers or max(taps, default=0),
        num_depths=int(raw["num_heads"]) if kind in ("medusa", "hydra") else None,
        num_blocks=int(own.get("num_blocks") or raw.get("medusa_num_layers") or 1),
        own_readouts=bool(own.get("own_readouts", True)),
        prefix=bool(own.get("prefix", False)),
        layer=layer,
        norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        tied=bool(own.get("tied", False)),
        signature=tuple(own.get("signature", ())),
        raw=dict(raw),
    )
