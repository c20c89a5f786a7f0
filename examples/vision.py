"""A vision-language model with random weights: the text depends on the image, and not on who drafts for it.

    python examples/vision.py

With a real checkpoint, an image is a path, bytes or a PIL image: {"prompt": "<image> What is this?", "images": ["cat.png"]}.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from outrider import LLM, SamplingParams
from outrider.models.heads import new_head
from outrider.models.heads.folder import new_config
from outrider.vision.embedding_and_output import read_vision_target

PLACEHOLDER = 99
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def random_llava(folder: str) -> None:
    """A tiny LLaVA that sees 16 patches of 4 x 4 pixels."""
    torch.manual_seed(0)
    eyes = CLIPVisionConfig(**SIZES, image_size=16, patch_size=4, projection_dim=32)
    text = LlamaConfig(**SIZES, vocab_size=100, max_position_embeddings=128)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=eyes, text_config=text, image_token_index=PLACEHOLDER))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.25)
    model.save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        random_llava(folder)
        llm = LLM(folder, method="prompt-lookup", dtype="float32", device="cpu")
        images = [{"pixel_values": torch.full((1, 3, 16, 16), brightness)} for brightness in (-1.0, 1.0)]
        prompts = [{"prompt": [1, 5, PLACEHOLDER, 7, 8], "images": [image]} for image in images]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        plain = [output.token_ids for output in llm.generate(prompts, params, method="plain")]
        drafted = [output.token_ids for output in llm.generate(prompts, params)]
        for name, ids in zip(("dark", "bright"), drafted, strict=True):
            print(f"{name:>6} image: {ids}")
        print("the same text with and without a drafter:", drafted == plain)
        raw, ends = read_vision_target(Path(folder))
        heads = new_head(new_config("vispec", raw), ends)  # untrained: `outrider train vispec` teaches them
        seen = llm.generate(prompts, params, method=llm.compose("vispec", heads=heads))
        print("the same text with heads that see the image:", [output.token_ids for output in seen] == plain)


if __name__ == "__main__":
    main()
