"""DFlash: one pass of a few layers fills a block of open positions, which attend to the target's features and to each other.

The block begins with the newest token. Every further position holds a mask token and predicts the token *at* that position,
like a diffusion model with one denoising step (Chen et al. 2026, arXiv 2602.06036). Positions of a block attend to each other
in both directions. The target's features, fused and scaled once, enter every layer as keys and values, made with the layer's
own matrices. Embedding and output matrix are the target's.

    c(j) = norm(fc [h_a ; h_b ; h_c]_j),      block of t:  b_0 = e(x_{t+1}),  b_k = e(mask)  at positions t + 1 + k
    layer:  Q from b,   K, V from [ c(j), j <= t ; b_0 .. b_K ],        q_{k-1}(t) = softmax(W_target norm(b_k))

P-EAGLE (``p_eagle.py``) reads true tokens with their features, and its open positions see earlier ones only. Here only features
are remembered. Lossless like all heads, which decide only how many guesses are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, final

from torch import Tensor

from outrider.models.heads.block_head import BlockHead, exported_keys
from outrider.models.heads.head import PackedTexts
from outrider.models.heads.kind import Exported, GgufLayout, HeadKind, Raw, need_whole_vocabulary
from outrider.models.heads.layer_numbers import as_outputs, from_outputs


@final
class DflashHead(BlockHead):
    """Every open position predicts its own token."""

    @property
    def num_places(self) -> int:
        """Number of positions in a block: the newest token's and the open ones."""
        return 1 + (self.config.num_depths or 4)

    def depths(self, batch: PackedTexts, count: int) -> Iterator[Tensor]:
        yield from self.blocks(batch)[1 : 1 + count]

    def readout(self, depth: int, state: Tensor) -> Tensor:
        del depth
        return self.read_off(self.norm(state))


@final
class DflashKind(HeadKind[DflashHead]):
    """Folders of DFlash heads. A public block size counts the newest token."""

    name = "dflash"
    module = DflashHead
    architectures = ("DflashModel", "DFlashDraftModel", "DFlashSpeculator")
    model_type = "dflash"
    counted_by = "num_heads"
    has_layer = True
    layer_type = "qwen3"
    num_taps = 3
    is_stack = True
    training: ClassVar = {"num_heads": 5, "num_depths": 5, "num_layers": 2, "decay": 0.78}
    formats = ("vllm",)
    gguf = GgufLayout("dflash", {"block_size": lambda head: head.num_places}, reads_top=False, has_mask=True)
    served_by = "outrider, vLLM (export vllm), llama.cpp (export gguf)"

    def read_keys(self, raw: Raw) -> Raw:
        """Our keys. The plain format numbers layers by their outputs, the speculators package by their inputs."""
        if "block_size" not in raw:
            return raw
        nested: Raw = raw.get("dflash_config") or {}
        taps = from_outputs(nested.get("target_layer_ids") or ()) or raw.get("aux_hidden_state_layer_ids")
        mask = nested.get("mask_token_id", raw.get("mask_token_id"))
        ours = {"num_heads": int(raw["block_size"]) - 1, "eagle_aux_hidden_state_layer_ids": taps, "mask_token_id": mask}
        return {**raw, **ours}

    def export(self, head: DflashHead, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Exports embedding and output matrix too, though they are the target's."""
        del form, target_name
        need_whole_vocabulary(head.config)
        kept = {name: tensor for name, tensor in state.items() if name != "d2t"}
        if head.config.tied:
            kept["lm_head.weight"] = kept["embed_tokens.weight"].clone()
        return _vllm_keys(head), kept


KIND = DflashKind()


def _vllm_keys(head: DflashHead) -> dict[str, Any]:
    layers = {"mask_token_id": head.config.mask_token, "target_layer_ids": as_outputs(head.config.taps)}
    keys = exported_keys(head, "num_heads", "mask_token_id", "draft_vocab_size")
    return {**keys, "architectures": ["DFlashDraftModel"], "dflash_config": layers}
