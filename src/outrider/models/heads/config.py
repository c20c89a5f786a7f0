"""What a folder of trained heads says about itself.

``config.json`` is the plain format that other engines read (EAGLE-1 and EAGLE-3: a Llama config of one layer; Medusa and the
MLP speculator: their own), plus one block of ours, ``outrider``: the kind, the tapped layers, and what identifies the target.
A public checkpoint without the block is understood where its architecture leaves no doubt.

    taps: the residual stream entering layer i, and i = L for the last layer's output, as everywhere in this project
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import ModelError, nearest
from outrider.models.config import ModelConfig, config_of


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What tells one kind of heads from another in a folder."""

    architectures: tuple[str, ...]
    """Names in ``config.json``; ours is the first."""
    model_type: str
    counted_by: str | None = None
    """Where ``config.json`` says how many depths there are; None for a head that is applied again and again."""
    has_layer: bool = False
    """There is a decoder layer, described as a Llama's."""
    layer_type: str = "llama"
    """Or as that of another family."""
    num_taps: int = 1
    is_stack: bool = False
    """There may be several such layers on top of each other."""
    served_by: str = "outrider"


KINDS: Mapping[str, Kind] = {
    "medusa": Kind(
        architectures=("MedusaModel",),
        model_type="medusa",
        counted_by="num_heads",
        served_by="outrider, vLLM (export vllm)",
    ),
    "hydra": Kind(architectures=("HydraModel",), model_type="hydra", counted_by="num_heads"),
    "eagle1": Kind(
        architectures=("LlamaForCausalLMEagle",),
        model_type="llama",
        has_layer=True,
        served_by="outrider, vLLM (export vllm), SGLang (export sglang)",
    ),
    "eagle3": Kind(
        architectures=("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel"),
        model_type="llama",
        has_layer=True,
        num_taps=3,
        served_by="outrider, vLLM, SGLang (export vllm), speculators (export speculators)",
    ),
    "mlp-speculator": Kind(
        architectures=("MLPSpeculatorPreTrainedModel",),
        model_type="mlp_speculator",
        counted_by="n_predict",
        served_by="outrider, vLLM's V0 engine, IBM's text generation server (export vllm)",
    ),
    "redrafter": Kind(architectures=("Drafter",), model_type="recurrent_drafting_drafter"),
    "mtp": Kind(architectures=("CausalMtpModel",), model_type="mtp", counted_by="num_heads", has_layer=True),
    "mtp-parallel": Kind(
        architectures=("ParallelMtpModel",), model_type="mtp_parallel", counted_by="num_heads", has_layer=True
    ),
    "l-mtp": Kind(architectures=("LeapMtpModel",), model_type="l_mtp", counted_by="num_heads"),
    "p-eagle": Kind(
        architectures=("PEagleDraftModel", "PEagleSpeculator"),
        model_type="llama",
        counted_by="num_heads",
        has_layer=True,
        num_taps=3,
        is_stack=True,
        served_by="outrider, vLLM with parallel drafting (export vllm)",
    ),
    "dflash": Kind(
        architectures=("DflashModel", "DFlashDraftModel", "DFlashSpeculator"),
        model_type="dflash",
        counted_by="num_heads",
        has_layer=True,
        layer_type="qwen3",
        num_taps=3,
        is_stack=True,
        served_by="outrider, vLLM (export vllm)",
    ),
}
HEAD_KINDS = tuple(KINDS)
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_ARCHITECTURES = {name: kind for kind, facts in KINDS.items() for name in facts.architectures}
_MODEL_TYPES = {facts.model_type: kind for kind, facts in KINDS.items() if facts.model_type != "llama"}


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
    num_layers: int = 1
    """Decoder layers on top of each other (P-EAGLE, DFlash)."""
    inner_size: int = 0
    """Width of the heads' own states where it is not the target's (MLP speculator, ReDrafter); 0 where it is."""
    tie_stages: bool = False
    """All stages of an MLP speculator are one."""
    scale_input: bool = False
    """An MLP speculator reads the target's state scaled to length 1 / sqrt 2."""
    stride: int = 1
    """Tokens from one leap head to the next (L-MTP)."""
    mask_token: int = 0
    """The token that stands for those not known yet (P-EAGLE, DFlash)."""
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
        if KINDS[self.kind].num_taps > 1 and len(self.taps) < 2:
            raise ModelError(f"{self.kind} reads several layers of the target and taps = {list(self.taps)}; name three")
        if self.stride < 1 or self.num_layers < 1 or not 0 <= self.mask_token < self.vocab_size:
            found = f"stride = {self.stride}, num_layers = {self.num_layers}, mask_token = {self.mask_token}"
            raise ModelError(f"{found} are not valid; use numbers of at least 1, and a token of the target")


def default_taps(kind: str, num_layers: int) -> tuple[int, ...]:
    """Three layers for EAGLE-3, P-EAGLE and DFlash (low, middle, high, as every engine takes them), the last one's output for
    the others."""
    if KINDS[kind].num_taps == 1:
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
    if kind == "eagle3" and {"pard_token", "ptd_token_id"} & set(raw):
        kind = "p-eagle"  # vLLM tells it by the token alone
    if kind is None:
        kind = _MODEL_TYPES.get(str(raw.get("model_type")))
    if kind is None:
        raise ModelError(
            f"{origin}: config.json describes {', '.join(names) or 'nothing known'}, which are no draft heads; "
            f"{nearest(str(raw.get('model_type')), _ARCHITECTURES)}"
        )
    return kind


def _read(raw: Mapping[str, Any], own: Mapping[str, Any], kind: str, num_layers: int) -> HeadConfig:
    if "transformer_layer_config" in raw:  # the speculators format nests the layer
        raw = {**raw["transformer_layer_config"], **{k: v for k, v in raw.items() if k != "transformer_layer_config"}}
    if kind == "dflash" and "block_size" in raw:
        raw = {**raw, **_dflash_keys(raw)}
    facts = KINDS[kind]
    has_layer = facts.has_layer or bool(own.get("prefix"))
    layer = (
        config_of({**raw, "model_type": raw.get("layer_type", facts.layer_type), "num_hidden_layers": 1}) if has_layer else None
    )
    layers = int(own.get("target_layers") or num_layers)
    taps = own.get("taps") or raw.get("eagle_aux_hidden_state_layer_ids") or (default_taps(kind, layers) if layers else ())
    hidden_size = int(raw["emb_dim"] if "emb_dim" in raw else raw["hidden_size"])
    return HeadConfig(
        kind=kind,
        hidden_size=hidden_size,
        vocab_size=int(raw["vocab_size"]),
        draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
        taps=tuple(int(tap) for tap in taps),
        target_layers=layers or max(taps, default=0),
        num_depths=int(raw[facts.counted_by]) if facts.counted_by and not (kind == "p-eagle" and not own) else None,
        num_blocks=int(own.get("num_blocks") or raw.get("medusa_num_layers") or raw.get("num_draft_layers") or 1),
        own_readouts=bool(own.get("own_readouts", True)),
        prefix=bool(own.get("prefix", False)),
        layer=layer,
        num_layers=int(own.get("num_layers") or raw.get("num_hidden_layers") or 1) if facts.is_stack else 1,
        inner_size=int(raw.get("inner_dim") or raw.get("exit_dim") or 0),
        tie_stages=bool(raw.get("tie_weights", False)),
        scale_input=bool(raw.get("scale_input", False)),
        stride=int(own.get("stride", 1)),
        mask_token=int(next((raw[key] for key in _MASKS if raw.get(key) is not None), 0)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        tied=bool(own.get("tied", False)),
        signature=tuple(own.get("signature", ())),
        raw=dict(raw),
    )


def _dflash_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a public DFlash folder says in other words: a block counts the newest token, and the plain format counts layers by
    their outputs; that of the speculators package by what enters them."""
    nested: Mapping[str, Any] = raw.get("dflash_config") or {}
    outputs: Sequence[int] = nested.get("target_layer_ids") or ()
    taps = [layer + 1 for layer in outputs] or raw.get("aux_hidden_state_layer_ids")
    mask = nested.get("mask_token_id", raw.get("mask_token_id"))
    return {"num_heads": int(raw["block_size"]) - 1, "eagle_aux_hidden_state_layer_ids": taps, "mask_token_id": mask}
