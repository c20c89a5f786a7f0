"""Images in chat requests: data URLs are read, everything else is refused with a reason, and the official client works."""

from __future__ import annotations

import base64
from functools import cache
from io import BytesIO
from typing import Any

import pytest
from inprocess import bundled, run
from tiny_vision import new_folder

from outrider import LLM, SamplingParams


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = new_folder("llava", tmp_path_factory.mktemp("served") / "llava")
    return LLM(str(folder), method="suffix", dtype="float32", device="cpu")


@cache
def picture(colour: int = 200) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    written = BytesIO()
    image.new("RGB", (24, 24), (colour, 10, 10)).save(written, "PNG")
    return written.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked(url: Any, *, text: str = "what?", **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 12}
    return {**body, "ignore_eos": True, "skip_special_tokens": False, **more}


def test_addresses_and_damage_are_refused(llava: LLM) -> None:
    async def work(service: Any, client: Any) -> None:
        del service
        for url, words in (
            ("https://example.com/cat.png", "https: addresses are not opened, since a prompt could reach"),
            ("/etc/passwd", "addresses are not opened"),
            ("data:image/png;base64,?", "not valid base64"),
            (None, "an image part has no image_url"),
            ({"path": "/etc/passwd"}, "an image part has no image_url"),
        ):
            answer = await client.post("/v1/chat/completions", json=asked(url))
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        body = asked("data:image/png;base64,aGk=", prompt_logprobs=1)
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "prompt_logprobs are of text" in answer.text
        parts = [{"type": "image", "image": "/etc/passwd"}]
        answer = await client.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": parts}]})
        assert answer.status_code == 400 and "only text parts are supported" in answer.text

    run(work, llm=llava)


def test_a_text_model_says_that_it_cannot_see() -> None:
    async def work(service: Any, client: Any) -> None:
        del service
        answer = await client.post("/v1/chat/completions", json=asked("data:image/png;base64,aGk="))
        assert answer.status_code == 400
        assert "is a text model and cannot see images; leave them out" in answer.json()["error"]["message"]

    run(work, llm=bundled())


def test_broken_and_large_images_are_refused(llava: LLM) -> None:
    data = picture()

    async def work(service: Any, client: Any) -> None:
        del service
        for sent, words in (
            (data[:40], "cannot be read as an image"),
            (b"hi", "cannot be read as an image"),
            (data, "24 x 24 = 576 pixels"),
        ):
            answer = await client.post("/v1/chat/completions", json=asked(url_of(sent)))
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        body = asked(url_of(data))
        body["messages"][0]["content"] *= 3
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "hold 3 images, and at most 2" in answer.text

    run(work, llm=llava, max_image_pixels=100, max_images=2)


def test_an_image_is_answered_and_counted(llava: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, skip_special_tokens=False)
    prompt = llava.codec.encode("user: <image>what?\nassistant:")
    wanted = [llava.generate({"prompt": prompt, "images": [picture(red)]}, params)[0].text for red in (200, 20)]
    assert wanted[0] != wanted[1]

    async def work(service: Any, client: Any) -> None:
        del service
        for red, text in zip((200, 20, 200), (*wanted, wanted[0]), strict=True):
            answer = (await client.post("/v1/chat/completions", json=asked(url_of(picture(red)), n=2))).json()
            assert [choice["message"]["content"] for choice in answer["choices"]] == [text, text]
            assert answer["usage"]["prompt_tokens"] == len(prompt) + 15
        part = {"type": "input_image", "image_url": url_of(picture(20))}
        said = [{"role": "user", "content": [part, {"type": "input_text", "text": "what?"}]}]
        body = {"input": said, "temperature": 0, "max_output_tokens": 12}
        answer = (await client.post("/v1/responses", json=body)).json()
        assert answer["usage"]["input_tokens"] == len(prompt) + 15

    run(work, llm=llava, prefill_tokens=7)


def test_the_official_client_sends_an_image(llava: LLM) -> None:
    openai = pytest.importorskip("openai", reason="needs the official client")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, skip_special_tokens=False)
    prompt = llava.codec.encode("user: <image>what?\nassistant:")
    wanted = llava.generate({"prompt": prompt, "images": [picture()]}, params)[0].text

    async def work(service: Any, client: Any) -> None:
        del service
        official = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
        more = {"ignore_eos": True, "skip_special_tokens": False}
        body = {name: value for name, value in asked(url_of(picture())).items() if name not in more}
        answer = await official.chat.completions.create(model="llava", **body, extra_body=more)
        assert answer.choices[0].message.content == wanted

    run(work, llm=llava)
