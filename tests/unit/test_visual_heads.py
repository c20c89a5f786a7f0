"""Heads that see images: drafting and training agree, compressed images shrink the draft's cache, and no text changes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import assert_goes_on_exactly
from test_train import CORPUS
from tiny_heads import random_head
from tiny_pair import VOCAB, tiny_model
from tiny_vision import IMAGE, image, new_folder

from outrider import LLM, ModelError, OptionError, SamplingParams
from outrider.cli.main import main
from outrider.core.interfaces import Context
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.heads.head_drafter import HeadState
from outrider.drafters.heads.visual import VisualEagle
from outrider.models.heads.folder import new_config, new_head
from outrider.models.heads.specvlm import EXPERTS, ExpertSizes
from outrider.models.heads.visual import VisualHead
from outrider.train.data import Corpus, Document, read_documents
from outrider.train.features import DocumentRows, compute
from outrider.train.objective import HeadObjective, HeadSettings, images_later
from outrider.vision.embedding_and_output import read_vision_target

TARGET = tiny_model()
SEEN = 7
"""The placeholder of ``tiny_heads``; the tiny target reads it as a word, which is an embedding like any other."""
WORDS = [token for token in random.Random(2).choices(range(VOCAB), k=60) if token != SEEN]
TEXT = [*WORDS[:3], *[SEEN] * 5, *WORDS[3:6], *[SEEN] * 3, *WORDS[6:16]]
PROMPT_LEN = 17
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "msd": ("msd", {}),
    "vispec": ("vispec", {"num_visual_queries": 3}),
    "vispec, more columns than places": ("vispec", {"num_visual_queries": 6}),
    "specvlm": ("specvlm", {"visual_ratio": 2}),
    **{f"specvlm, {name}": ("specvlm", {"visual_experts": name, "visual_ratio": 2}) for name in EXPERTS},
}
ENTRIES = {"msd": (5, 3), "vispec": (2, 2), "vispec, more columns than places": (5, 3)}
ENTRIES |= {"specvlm, full": (5, 3), "specvlm, none": (0, 0), "specvlm, resampler": (2, 2)}
ENTRIES |= dict.fromkeys(("specvlm, pool", "specvlm, conv", "specvlm, prune"), (3, 2))
"""Columns that the two images of TEXT take in the draft's cache."""


def head_of(name: str) -> VisualHead:
    kind, shape = SHAPES[name]
    head = random_head(kind, **shape).eval()
    assert isinstance(head, VisualHead)
    return head


def start(drafter: VisualEagle, prompts: list[list[int]]) -> tuple[HeadState, Context]:
    """The rows after their prompts were read by the target."""
    cache = TARGET.new_cache(len(prompts))
    taps = TARGET.prefill([prompt[:-1] for prompt in prompts], cache, taps=drafter.taps)
    states = [RequestState.of(Request(prompt, SamplingParams(max_tokens=9))) for prompt in prompts]
    noise = Noise(torch.zeros(len(prompts)).long(), torch.zeros(len(prompts)).long())
    context = Context(prompts, Sampler(states, VOCAB, TARGET.device), noise, TARGET.device, cache)
    return drafter.start(prompts, taps), context


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_drafting_computes_what_training_computes(name: str) -> None:
    """Training hides columns from attention; drafting leaves them out. A second row, and a second round of text, share it."""
    head = head_of(name)
    drafter = VisualEagle(head)
    documents = [Document(tuple(TEXT), PROMPT_LEN), Document(tuple(WORDS[:9]), 4)]
    rows = DocumentRows(compute(TARGET, documents, head.config.taps), documents, row_len=64, last=TARGET.num_layers)
    with torch.inference_mode():
        first, second = head.depths(rows.packed(head.config.taps), 2)
        state, context = start(drafter, [TEXT[:PROMPT_LEN], WORDS[:4]])
        growth = drafter._growth(state, context, 2)
        root = growth.root().adjusted
        below = growth.expand(torch.tensor([[TEXT[PROMPT_LEN]], [WORDS[4]]]), torch.zeros(2, 1, dtype=torch.int64)).adjusted
        same(root[0, 0], head.readout(0, first[0, PROMPT_LEN - 2]))
        same(root[1, 0], head.readout(0, first[0, len(TEXT) + 2]))
        same(below[0, 0], head.readout(1, second[0, PROMPT_LEN - 2]))
        same(below[1, 0], head.readout(1, second[0, len(TEXT) + 2]))
        assert state.cache is not None and state.kept is not None
        state.cache.truncate(state.kept)
        more = TARGET.prefill([TEXT[PROMPT_LEN - 1 : PROMPT_LEN + 2], WORDS[3:6]], context.cache, taps=drafter.taps)
        state.pending.note({tap: torch.stack(list(more[tap])) for tap in drafter.taps}, [range(3)] * 2)
        later = replace(context, tokens=[TEXT[: PROMPT_LEN + 3], WORDS[:7]])
        root = drafter._growth(state, later, 1).root().adjusted
        same(root[0, 0], head.readout(0, first[0, PROMPT_LEN + 1]))
        same(root[1, 0], head.readout(0, first[0, len(TEXT) + 5]))


@pytest.mark.parametrize("name", ENTRIES)
def test_images_take_as_many_places_of_the_cache_as_the_kind_says(name: str) -> None:
    drafter = VisualEagle(head_of(name))
    state, context = start(drafter, [TEXT[:PROMPT_LEN], WORDS[:6]])
    with torch.inference_mode():
        drafter._growth(state, context, 1)
    assert state.cache is not None
    assert state.cache.lengths == [PROMPT_LEN - 1 - 8 + sum(ENTRIES[name]), 5] and state.num_read == [PROMPT_LEN - 1, 5]
    joined = state.fork([1]).join(state.fork([0]))
    assert joined.num_read == [5, PROMPT_LEN - 1]


def test_what_experts_keep() -> None:
    columns, there = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    columns[1, 3:] = 0
    sizes = ExpertSizes(8, 2, 2)
    for name in ("pool", "conv"):
        vectors, kept = EXPERTS[name](sizes)(columns, there)
        assert kept.tolist() == [[False, True, False, True, True], [False, True, True, False, False]]
        torch.testing.assert_close(vectors[0, 1], columns[0, :2].mean(0))
    assert torch.equal(EXPERTS["pool"](sizes)(columns, there)[0][1, 2], columns[1, 2])
    prune = EXPERTS["prune"](sizes)
    _, kept = prune(columns, there)
    scores = prune.score(columns)[0, :, 0]  # type: ignore[operator]
    assert kept.sum(1).tolist() == [3, 2] and set(kept[0].nonzero()[:, 0].tolist()) == set(scores.topk(3).indices.tolist())


def test_the_gate_learns_and_reads_the_question() -> None:
    head = head_of("specvlm")
    documents = [Document(tuple(TEXT), PROMPT_LEN)]
    batch = DocumentRows(compute(TARGET, documents, head.config.taps), documents, row_len=1, last=TARGET.num_layers).packed(
        (0, 2)
    )
    columns = head.columns_of(batch)
    asked = [TEXT[place + 1] for place in columns.asked[0].nonzero()[:, 0].tolist()]
    assert asked == TEXT[1:PROMPT_LEN], "an answer would tell the gate what it must not know"
    torch.manual_seed(0)
    head.train().requires_grad_(True)
    next(head.depths(batch, 1)).square().sum().backward()
    grad = head.gate.weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, torch.Tensor) and grad[:, :32].any() and grad[:, 32:].any()


def test_texts_come_first_and_images_last() -> None:
    text, seen = Document((1, 2)), Document((3, 4), seen=lambda: pytest.fail("not read"))
    batch = [text, seen] * 4
    assert images_later(batch, 0.0) == images_later(batch, 0.5) == [text] * 4
    assert images_later(batch, 0.75) == [text] * 2 + [seen] * 2 and images_later(batch, 1.0) == [seen] * 4
    assert images_later([seen] * 3, 0.0) == [seen] * 3


@pytest.mark.parametrize("kind", ["msd", "vispec", "specvlm"])
def test_a_killed_run_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    """Every prompt has the placeholders of an image."""
    texts = [Document((one.tokens[0], *[SEEN] * 4, *one.tokens[1:]), one.begin + 4) for one in CORPUS.train]

    def objective() -> HeadObjective:
        head = random_head(kind)
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3, noise=0.1))

    assert_goes_on_exactly(objective, tmp_path, corpus=Corpus.of(texts, held_out=6))


def test_a_text_target_has_no_heads_that_see() -> None:
    with pytest.raises(ModelError, match="draft for vision-language targets, and this one reads text; use 'eagle1'"):
        random_head("vispec", image_token_id=None)
    with pytest.raises(ModelError, match="leaves no column for an image"):
        random_head("vispec", num_visual_queries=1)
    with pytest.raises(ModelError, match="'pol' is not an expert; did you mean 'pool'"):
        random_head("specvlm", visual_experts="pol")


# --- a vision-language target ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = new_folder(family, tmp_path_factory.mktemp("visual") / family)
    return LLM(str(folder), method="plain", dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["msd", "vispec", "specvlm"])
def test_no_text_changes_with_images_in_ragged_batches(kind: str, family: str, llm: LLM) -> None:
    """Greedy and sampled: one image, two, none, in one batch and alone."""
    raw, ends = read_vision_target(Path(llm.model_name))
    head = new_head(new_config(kind, raw), ends).requires_grad_(False).eval()
    one, two = image(family, 1), image(family, 2, size=(16, 24) if family == "qwen2_vl" else (16, 16))
    prompts: list[Any] = [
        {"prompt": [10, 50, IMAGE, 70, 80, 90], "images": [one]},
        {"prompt": [10, IMAGE, IMAGE, 60, 70, 60, 70], "images": [two, one]},
        [10, 50, 60, 70, 50, 60],
    ]
    for params in (SamplingParams(max_tokens=12, temperature=0), SamplingParams(max_tokens=12, temperature=0.9, seed=4)):
        plain = [list(text.token_ids) for text in llm.generate(prompts, params, method="plain")]
        for options in ({"branching": "chain"}, {}):
            method = llm.compose(kind, heads=head, num_draft_tokens=3, **options)
            outputs = llm.generate(prompts, params, method=method)
            assert [list(text.token_ids) for text in outputs] == plain
            assert all(text.stats.num_drafted for text in outputs)
        method = llm.compose(kind, heads=head, num_draft_tokens=3)
        assert [list(llm.generate([prompt], params, method=method)[0].token_ids) for prompt in prompts] == plain


def test_heads_are_trained_on_files_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="images in files need Pillow")
    folder = new_folder("llava", tmp_path / "llava")
    lines = []
    for number in range(6):
        pillow.new("RGB", (16, 16), (40 * number, 90, 10)).save(tmp_path / f"{number}.png")
        lines.append({"prompt": f"<image>What is {number}?", "images": [f"{number}.png"], "text": "a plain colour, I say"})
    lines += [{"text": f"no image at all in text {number}"} for number in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    settings = ["-O", "max_steps=2", "-O", "batch_size=3", "-O", "judge_every=1", "-O", "save_every=2"]
    command = ["train", "msd,vispec,specvlm", "--target", str(folder), "--data", str(data), "--out", str(tmp_path / "runs")]
    assert main([*command, "--held-out", "2", "--device", "cpu", *settings, "-O", "visual_ratio=2"]) == 0
    assert "tokens per pass" in capsys.readouterr().out
    llm = LLM(str(folder), method="vispec", heads=str(tmp_path / "runs" / "vispec"), dtype="float32", device="cpu")
    prompt = {"prompt": "<image>What is this?", "images": [str(tmp_path / "1.png")]}
    said = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0))[0]
    assert said.token_ids == llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0), method="plain")[0].token_ids
    with pytest.raises(OptionError, match="has images and the target reads text"):
        read_documents([data], llm.codec, max_len=64)
