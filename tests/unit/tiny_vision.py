"""Tiny random vision-language models of transformers, saved as folders, with processed images and their own ``generate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, IMAGE = 300, 299
"""Bytes, a few special tokens, and the placeholder of an image."""
TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "max_position_embeddings": 256, "vocab_size": VOCAB}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VIT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"image_size": 16, "patch_size": 4}
QWEN_VIT: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
SPECIAL = {"vision_start_token_id": 297, "vision_end_token_id": 298, "video_token_id": 296, "image_token_id": IMAGE}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VIT},
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_index": IMAGE,
        "vision_feature_layer": -2,
    },
    "qwen2_vl": {
        "vision_config": {**QWEN_VIT, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        "text_config": {"rope_parameters": AXES, **TEXT},
        **SPECIAL,
    },
    "qwen2_5_vl": {
        "vision_config": {
            **QWEN_VIT,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "text_config": {"rope_parameters": AXES, **TEXT},
        **SPECIAL,
    },
    "idefics3": {
        "vision_config": VIT,
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
}
PROCESSOR = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "do_center_crop": True}
PROCESSOR |= {"crop_size": {"height": 16, "width": 16}}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
)
CONFIGS["smolvlm"] = CONFIGS["idefics3"]
CONFIGS["llava-qwen2"] = {**CONFIGS["llava"], "text_config": {"model_type": "qwen2", **TEXT}, "tie_word_embeddings": True}


def new_folder(family: str, folder: Path) -> Path:
    """A random model, saved."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family.split("-", maxsplit=1)[0]](**CONFIGS[family])
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    _add_tokenizer(folder)
    if family.startswith("llava"):
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def new_draft(folder: Path) -> Path:
    """A random text model with the same vocabulary."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**{**TEXT, "num_hidden_layers": 1}))
    model.save_pretrained(folder)
    _add_tokenizer(folder)
    return folder


def _add_tokenizer(folder: Path) -> None:
    """Bytes, then the special tokens that write images, the placeholder last; and a chat template that knows images."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    named = ["<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))]
    spare = [f"<spare_{number}>" for number in range(IMAGE - len(letters) - len(named))]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*named, *spare, "<image>")])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def opened(folder: Path) -> Any:
    """As transformers itself runs it."""
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def image(family: str, seed: int, *, size: tuple[int, int] = (16, 16)) -> dict[str, Any]:
    """A processed image of random pixels."""
    chance = torch.Generator().manual_seed(seed)
    height, width = size
    if family.startswith("qwen"):
        grid = torch.tensor([[1, height // 4, width // 4]])
        return {"pixel_values": torch.randn(int(grid.prod()), 3 * 2 * 4 * 4, generator=chance), "image_grid_thw": grid}
    pixels = torch.randn(1, 3, height, width, generator=chance)
    return {"pixel_values": pixels if family.startswith("llava") else pixels[:, None]}


def expected(model: Any, ids: Sequence[int], images: Sequence[dict[str, Any]], num_tokens: int, **options: Any) -> list[int]:
    """What ``generate`` of transformers says after a prompt whose placeholders are written out."""
    joined = {name: torch.cat([one[name] for one in images], _axis(name, one)) for one in images[:1] for name in one}
    if joined and "image_grid_thw" in joined:
        joined["mm_token_type_ids"] = (torch.tensor([list(ids)]) == IMAGE).int()
    rows = torch.tensor([list(ids)])
    made = model.generate(
        input_ids=rows, attention_mask=torch.ones_like(rows), max_new_tokens=num_tokens, do_sample=False, **joined, **options
    )
    return made[0, len(ids) :].tolist()


def _axis(name: str, one: dict[str, Any]) -> int:
    return 1 if name == "pixel_values" and one[name].dim() == 5 else 0
