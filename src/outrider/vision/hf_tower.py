"""A vision tower and its projector, run by transformers, without the language model.

transformers opens the whole checkpoint. The language model's tensors go to the lean decoder. The rest turns pixels into
embeddings of the decoder's width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError, RequestError
from outrider.models.weights import TensorDict
from outrider.vision.families import VisionFamily
from outrider.vision.pixels import Pixels, Process


@final
class Tower:
    """Turns pixels into embeddings."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device, self.dtype = model.device, model.dtype
        self._arguments = set(inspect.signature(model.get_image_features).parameters)

    @torch.inference_mode()
    def features(self, pixels: Pixels) -> Tensor:
        """[N, H] one embedding for each position that the image takes in a prompt."""
        inputs = {name: self._placed(value) for name, value in pixels.inputs.items() if name in self._arguments}
        try:
            made = self._model.get_image_features(**inputs)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(f"the vision tower cannot read this image ({reason}); process it for this model") from None
        made = getattr(made, "pooler_output", made)
        parts = [made] if isinstance(made, Tensor) else list(made)
        return torch.cat([part.flatten(0, -2) for part in parts]).clone()

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)


def open_parts(
    folder: Path, family: VisionFamily, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tower, TensorDict, dict[str, Any]]:
    """The vision tower, the tensors of the language model, and its config in the form that our decoder reads."""
    from transformers import AutoModelForImageTextToText

    try:
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, and all of them mean that the folder cannot be used
        reason = " ".join(str(error).split())[:200]
        why = f"{type(error).__name__}: {reason}"
        raise ModelError(f"{folder}: transformers cannot open it ({why}); fetch it again, or use another model") from error
    inner, head = model.model, model.lm_head
    text = getattr(inner, family.text_module)
    tensors = {f"model.{name}": tensor for name, tensor in text.state_dict().items()}
    tensors["lm_head.weight"] = head.weight.detach()
    raw = _text_config(model.config, family)
    setattr(inner, family.text_module, None)  # its tensors belong to the decoder now
    return Tower(inner.eval().requires_grad_(False).to(device)), TensorDict(tensors, str(folder)), raw


def _text_config(config: Any, family: VisionFamily) -> dict[str, Any]:
    """The language model's part of the config, completed with entries of the whole config."""
    text = config.get_text_config()
    raw = {key: value for key, value in text.to_dict().items() if value is not None}
    raw["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False) or raw.get("tie_word_embeddings"))
    raw["model_type"] = family.text_type or raw["model_type"]
    if raw["model_type"] == "qwen2" and not raw.get("use_sliding_window"):
        raw.pop("sliding_window", None)
    return raw


def image_token_of(config: Mapping[str, Any], folder: Path) -> int:
    """The token id that stands for an image in a prompt."""
    found = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(found, int):
        raise ModelError(f"{folder}: config.json names no image_token_id; fetch the model again")
    return found


def new_processor(folder: Path, family: VisionFamily) -> Process | None:
    """The model's image processor, as a function of one PIL image; None if the folder has none. It is opened for the first
    image, so a model without images does not need Pillow."""
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    open_once = cache(partial(_open_processor, folder))
    if not family.is_tiled:
        return lambda image: open_once()(images=image, return_tensors="pt")
    return lambda image: open_once()(images=[[image]], return_tensors="pt", return_row_col_info=True)


def _open_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, and all of them mean that the folder cannot be used
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder}: its image processor cannot be opened ({reason}); fetch preprocessor_config.json"
        ) from error
