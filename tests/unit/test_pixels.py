"""Images as users give them: what is read, what is refused, and that a model sees the same pixels as in transformers."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import IMAGE, expected, new_folder, opened

from outrider import LLM, RequestError, SamplingParams
from outrider.vision.messages import data_of, in_text, parted
from outrider.vision.pixels import ImageLimits, Pixels, pixels_of

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def refuse(image: Any, words: str, **limits: int) -> None:
    with pytest.raises(RequestError, match=words):
        pixels_of(image, lambda found: {"pixel_values": torch.zeros(1)}, ImageLimits(**limits))


def test_data_urls_are_read_and_other_addresses_are_not() -> None:
    assert data_of("data:image/png;base64,aGk=") == b"hi"
    for url, words in (
        ("https://example.com/cat.png", "https: addresses are not opened, .* data URL"),
        ("file:///etc/passwd", "file: addresses are not opened"),
        ("data:image/png,raw", "is not base64"),
        ("data:image/png;base64,a?b", "not valid base64"),
    ):
        with pytest.raises(RequestError, match=words):
            data_of(url)


def test_a_conversation_is_parted_into_words_and_images() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    content = [{"type": "text", "text": "see "}, {"type": "image", "image": "cat.png"}, url, {"type": "text", "text": "?"}]
    said, images = parted([{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}])
    assert images == ["cat.png", b"hi"]
    assert [part["type"] for part in said[0]["content"]] == ["text", "image", "image", "text"] and said[1]["content"] == "yes"
    assert in_text(said[0], "<image>")["content"] == "see <image><image>?"
    with pytest.raises(RequestError, match="an image part has no image"):
        parted([{"role": "user", "content": [{"type": "image"}]}])


def test_the_same_pixels_have_the_same_key() -> None:
    one, other = torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4, 4)
    other[0, 0, 0, 0] = 1
    keys = [Pixels({"pixel_values": pixels}).key for pixels in (one, one.clone(), other, one.view(3, 1, 4, 4))]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert Pixels({"pixel_values": one}, (1, 2)).key != keys[0]


def test_what_cannot_be_read_is_refused() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    good = BytesIO()
    image.new("RGB", (40, 20), (200, 10, 10)).save(good, "PNG")
    refuse(b"not an image at all", "cannot be read as an image; send a whole PNG")
    refuse(b"", "an empty image cannot be read")
    refuse(good.getvalue()[:60], "cannot be opened|is broken")
    refuse(good.getvalue(), "at most 20 are taken; send a smaller file", max_bytes=20)
    refuse(good.getvalue(), "40 x 20 = 800 pixels, and at most 100", max_pixels=100)
    refuse("nowhere.png", "no such image file")
    refuse("https://example.com/cat.png", "addresses are not opened here")
    refuse(17, "int is not an image")
    with pytest.raises(RequestError, match="40 x 20 pixels cannot be prepared for this model"):
        pixels_of(good.getvalue(), lambda found: torch.zeros(2).view(5), ImageLimits())  # pyright: ignore[reportArgumentType]


def test_a_picture_is_seen_as_in_transformers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    from transformers import AutoImageProcessor

    picture = image.new("RGB", (40, 20), (200, 10, 10))
    picture.paste((10, 200, 90), (5, 5, 20, 15))
    picture.save(tmp_path / "cat.png")
    folder = new_folder("llava", tmp_path / "llava")
    llm = LLM(str(folder), method="suffix", dtype="float32", device="cpu")
    data = (tmp_path / "cat.png").read_bytes()
    prompts = [{"prompt": "<image> what is it?", "images": [one]} for one in (picture, tmp_path / "cat.png", data)]
    found = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    processed = AutoImageProcessor.from_pretrained(folder)(images=picture, return_tensors="pt")
    ids = llm.requests(prompts[:1])[0].prompt_ids
    assert ids.count(IMAGE) == 16
    assert found == [expected(opened(folder), ids, [dict(processed)], 12, eos_token_id=None)] * 3
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    text = llm.codec.encode("system: Look.\nuser: <image>what?\nassistant:")
    answer = llm.chat(chat, GREEDY)[0].token_ids
    assert answer == llm.generate({"prompt": text, "images": [picture]}, GREEDY)[0].token_ids
