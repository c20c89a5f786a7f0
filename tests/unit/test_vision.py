"""Vision-language targets say what transformers says, whatever drafts for them and whoever shares the batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import IMAGE, expected, image, new_draft, new_folder, opened

from outrider import LLM, OptionError, RequestError, SamplingParams
from outrider.cache.prefixes import prefix_tree
from outrider.core.request import RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler
from outrider.vision.positions import Span, axis_positions, turned_positions

FAMILIES = ("llava", "llava-qwen2", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
TEXT_ROW = [10, 50, 60, 70, 50, 60]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("vision")

    @cache
    def made(name: str) -> Path:
        return new_draft(root / name) if name == "draft" else new_folder(name, root / name)

    return made


@pytest.fixture(scope="module")
def llms(folders: Any) -> Any:
    @cache
    def made(family: str, fast: bool = True) -> LLM:
        draft = str(folders("draft"))
        return LLM(str(folders(family)), draft=draft, dtype="float32", device="cpu", fast=fast)

    return made


def prompts_of(family: str) -> list[Any]:
    """One image, two of different sizes where the family allows it, and text alone: rows of different lengths."""
    first, second = image(family, 1), image(family, 2, size=(16, 24) if family.startswith("qwen") else (16, 16))
    one = {"prompt": [10, 50, IMAGE, 70, 80, 90], "images": [first]}
    two = {"prompt": [10, 50, IMAGE, 70, IMAGE, 60, 70, 60, 70], "images": [second, first]}
    return [one, two, TEXT_ROW]


def texts_of(llm: LLM, prompts: list[Any], **options: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate(prompts, GREEDY, **options)]


def expected_texts(folder: Path, llm: LLM, prompts: list[Any]) -> list[list[int]]:
    model = opened(folder)
    rows = [request.prompt_ids for request in llm.requests(prompts)]
    images = [one["images"] if isinstance(one, dict) else [] for one in prompts]
    return [expected(model, ids, seen, 16, eos_token_id=None) for ids, seen in zip(rows, images, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, folders: Any, llms: Any) -> None:
    llm, prompts = llms(family), prompts_of(family)
    wanted = expected_texts(folders(family), llm, prompts)
    assert wanted[0] != wanted[1]
    for method in ("plain", "prompt-lookup", "suffix", "draft-model", "draft-tree", "early-exit"):
        assert texts_of(llm, prompts, method=method) == wanted, method


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_the_plain_decoder_says_the_same(family: str, folders: Any, llms: Any) -> None:
    llm, prompts = llms(family, False), prompts_of(family)
    assert texts_of(llm, prompts) == expected_texts(folders(family), llm, prompts)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_sampled_text_depends_on_the_seed_alone(family: str, llms: Any) -> None:
    llm, prompts = llms(family), prompts_of(family)
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True)
    plain = [one.token_ids for one in llm.generate(prompts, params, method="plain")]
    assert [one.token_ids for one in llm.generate(prompts, params, method="draft-tree")] == plain
    assert [llm.generate([one], params, method="suffix")[0].token_ids for one in prompts] == plain


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_prompts_in_pieces_and_shared_beginnings_change_nothing(family: str, llms: Any) -> None:
    """Same ids and another image is another prompt; the same image again is a known one."""
    llm, text = llms(family), list(range(20, 40))
    images = [image(family, seed) for seed in (1, 2, 1)]
    prompts = [{"prompt": [*text, IMAGE, *text], "images": [one]} for one in images]
    wanted = [texts_of(llm, [one])[0] for one in prompts]
    assert wanted[0] != wanted[1] and wanted[0] == wanted[2]
    prefixes = prefix_tree(llm.target.new_cache(1), 1 << 24)
    scheduler = Scheduler(llm.target, lambda _: llm.method, slots=Slots(1, 5), prefixes=prefixes, isolates=False)
    states = [RequestState.of(request) for request in llm.requests([*prompts, [*text, 3]], GREEDY)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    while not scheduler.is_idle:
        scheduler.round()
    assert [state.output_ids for state in states[:3]] == wanted
    assert states[3].output_ids == texts_of(llm, [[*text, 3]])[0]
    assert prefixes.num_hits >= 1 and prefixes.num_hit_tokens >= len(states[2].request.prompt_ids) - 1


def test_an_image_that_was_sent_back_to_wait_is_read_again(llms: Any) -> None:
    llm, prompts = llms("qwen2_vl"), prompts_of("qwen2_vl")
    wanted = texts_of(llm, prompts)
    scheduler = Scheduler(llm.target, lambda _: llm.method, slots=Slots(4, 512), isolates=False)
    states = [RequestState.of(request) for request in llm.requests(prompts, GREEDY)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
    for turn in range(100):
        if scheduler.is_idle:
            break
        scheduler.round()
        if turn == 1:
            scheduler._send_back(1)
    assert [state.output_ids for state in states] == wanted


def test_drafters_see_placeholders_and_the_target_sees_embeddings(llms: Any) -> None:
    llm = llms("llava")
    request = llm.requests(prompts_of("llava")[:1])[0]
    assert max(request.prompt_ids) < llm.target.vocab_size and len(request.read_ids) == len(request.prompt_ids)
    same = [one == other for one, other in zip(request.prompt_ids, request.read_ids, strict=True)]
    assert same.count(False) == request.prompt_ids.count(IMAGE) == 16
    text = llm.requests([TEXT_ROW])[0]
    assert list(text.read_ids) == [] and RequestState.of(text).read_tokens == TEXT_ROW


def test_axes_of_positions_are_those_of_transformers(folders: Any) -> None:
    model = opened(folders("qwen2_vl")).model
    ids = torch.tensor([[5, 6, *[IMAGE] * 4, 7, *[IMAGE] * 6, 8]])
    grids = torch.tensor([[1, 4, 4], [1, 4, 6]])
    found, _ = model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids)
    spans = [Span(2, 2, 2), Span(7, 2, 3)]
    positions, following = axis_positions(spans)
    assert torch.equal(positions, found[:, 0, :13]) and following == int(found[0, 0, 13])
    turned = turned_positions(spans, [2, 3, 3])
    assert turned.shape == (13, 8) and turned[0].tolist() == [13.0 - following] * 8
    assert turned[-1].tolist() == [float(positions[axis, -1] + 13 - following) for axis in (0, 0, 1, 1, 1, 2, 2, 2)]


def test_mistakes_are_told(llms: Any, folders: Any) -> None:
    llm, seen = llms("llava"), image("llava", 1)
    for prompt, images, words in (
        ([5, 6, 7], [seen], "0 placeholders <image> for 1 images; write <image> once"),
        ([5, IMAGE, IMAGE, 7], [seen], "2 placeholders"),
        ([5, IMAGE], [seen], "ends with an image"),
        ([5, IMAGE, 7], [{"pixels": 1}], "needs pixel_values"),
        ([5, IMAGE, 7], [{"pixel_values": torch.zeros(1, 3, 9, 9)}], "vision tower cannot read"),
        ([5, IMAGE, 7], seen["pixel_values"], "is not a list"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate({"prompt": prompt, "images": images})
    with pytest.raises(RequestError, match="has pictures, which is not known"):
        llm.generate({"prompt": [5, 6], "images": [], "pictures": []})
    with pytest.raises(RequestError, match="has images and no prompt"):
        llm.generate([{"images": [seen]}])
    with pytest.raises(RequestError, match="beam search reads text only"):
        llm.beam_search({"prompt": [5, IMAGE, 7], "images": [seen]})
    text_model = LLM(str(folders("draft")), method="plain", dtype="float32", device="cpu")
    with pytest.raises(RequestError, match=r"is a text model and cannot see images; .* load a model of type llava"):
        text_model.generate({"prompt": [5, 6, 7], "images": [seen]})
    with pytest.raises(OptionError, match="keep_prompt is not available"):
        LLM(str(folders("llava")), draft=str(folders("draft")), keep_prompt=0.5, dtype="float32", device="cpu")
