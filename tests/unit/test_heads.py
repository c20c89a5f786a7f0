"""Trained heads: drafting computes what training computed; folders are checked, wrong ones refused with their reason."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import CHANGES, random_head, random_heads
from tiny_pair import VOCAB, tiny_model

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.core.errors import CompositionError, ModelError
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.heads.head_drafter import HeadDrafter
from outrider.methods import compose
from outrider.models.heads import PackedTexts, load_head, save_head
from outrider.models.heads.folder import signature_of
from outrider.train.data import Document
from outrider.train.features import DocumentRows, compute
from outrider.train.objective import HeadObjective, HeadSettings

TARGET = tiny_model()
TEXT = random.Random(5).choices(range(VOCAB), k=23)


def packed(texts: list[list[int]], taps: tuple[int, ...]) -> PackedTexts:
    """Texts in one row, with the target's states."""
    found = compute(TARGET, [Document(tuple(text)) for text in texts], taps)
    rows = range(len(texts))
    return PackedTexts(
        tokens=torch.tensor([[token for text in texts for token in text]]),
        features=torch.cat([torch.cat([found[tap][row] for tap in taps], -1) for row in rows])[None],
        last=torch.cat([found[TARGET.num_layers][row] for row in rows])[None],
        segments=torch.tensor([[row for row in rows for _ in texts[row]]]),
        positions=torch.tensor([[place for row in rows for place in range(len(texts[row]))]]),
        supervised=torch.ones(1, sum(map(len, texts)), dtype=torch.bool),
    )


def drafted_logits(drafter: HeadDrafter, split: int, depth: int) -> list[torch.Tensor]:
    """Logits of a chain along TEXT below the token ``split``, the prompt read in two rounds."""
    first, tokens = TEXT[: split - 3], TEXT[: split + 1]
    cache = TARGET.new_cache(1)
    taps = TARGET.prefill([first[:-1]], cache, taps=drafter.taps)
    state = drafter.start([first], taps)
    request = RequestState.of(Request(tokens, SamplingParams(max_tokens=9)))
    context = Context(
        [tokens],
        Sampler([request], VOCAB, TARGET.device),
        Noise(torch.zeros(1).long(), torch.zeros(1).long()),
        TARGET.device,
        cache,
    )
    with torch.inference_mode():
        early = Context([first], context.sampler, context.noise, context.device, cache)
        drafter.propose(state, early, Plan((2,), (4,)))  # leaves drafted columns behind, which must not be seen later
        for module in state.modules:
            if module.cache is not None and module.kept is not None:
                module.cache.truncate(module.kept)
        rest = TARGET.prefill([TEXT[split - 4 : split]], cache, taps=drafter.taps)
        state.pending.note({tap: rest[tap][0][None] for tap in drafter.taps}, [range(4)])
        growth = drafter._growth(state, context, depth)
        laws = [growth.root().adjusted[0, 0]]
        for level in range(1, depth):
            law = growth.expand(torch.tensor([[TEXT[split + level]]]), torch.tensor([[level - 1]]))
            laws.append(law.adjusted[0, 0])
    return laws


@pytest.mark.parametrize("kind", list(CHANGES))
def test_drafting_computes_what_training_computes(kind: str, tmp_path: Path) -> None:
    """The packed pass, two texts in a row, against a prompt read in pieces and a chain grown level by level."""
    folder = random_heads(kind, tmp_path / kind)
    drafter = compose(kind, TARGET, options={"heads": folder}).drafter
    assert isinstance(drafter, HeadDrafter)
    head = load_head(folder, TARGET)
    batch, other = packed([TEXT[::-1][:9], TEXT], head.config.taps), 9
    with torch.no_grad():
        states = list(head.depths(batch, 4))
    for split in (8, 14):
        for depth, law in enumerate(drafted_logits(drafter, split, 4)):
            expected = head.over_target(head.readout(depth, states[depth][0, other + split - 1]))
            torch.testing.assert_close(law, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", list(CHANGES))
def test_places_of_other_texts_do_not_count(kind: str) -> None:
    head = random_head(kind)
    alone, beside = packed([TEXT], head.config.taps), packed([TEXT[:7], TEXT], head.config.taps)
    with torch.no_grad():
        for mine, other in zip(head.depths(alone, 3), head.depths(beside, 3), strict=True):
            torch.testing.assert_close(mine[0, :18], other[0, 7:25], atol=1e-5, rtol=1e-4)
    assert beside.valid(1)[0].tolist() == [True] * 5 + [False] * 2 + [True] * 21 + [False] * 2


def test_a_static_tree_and_a_best_first_tree_fit_the_plan(tmp_path: Path) -> None:
    folder = random_heads("medusa", tmp_path / "m")
    for options in ({"branching": "3,2,1"}, {}):
        drafter = compose("medusa", TARGET, options={"heads": folder, **options}).drafter
        prompt = TEXT[:6]
        taps = TARGET.prefill([prompt[:-1]], TARGET.new_cache(1), taps=drafter.taps)
        request = RequestState.of(Request(prompt, SamplingParams()))
        noise = Noise(torch.zeros(1).long(), torch.zeros(1).long())
        context = Context([prompt], Sampler([request], VOCAB, TARGET.device), noise, TARGET.device)
        with torch.inference_mode():
            tree = drafter.propose(drafter.start([prompt], taps), context, Plan((3,), (7,))).tree
        assert tree.sizes[0] == 8 and int(tree.depths.max()) <= 3


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    folder = Path(random_heads("eagle3", tmp_path / "e"))
    with pytest.raises(ModelError, match="holds eagle3 heads"):
        compose("medusa", TARGET, options={"heads": str(folder)})
    with pytest.raises(CompositionError, match="needs the option 'heads'"):
        compose("eagle3", TARGET)
    with pytest.raises(ModelError, match="61 tokens and this one has 40"):
        compose("eagle3", tiny_model(vocab_size=40), options={"heads": str(folder)})
    with pytest.raises(CompositionError, match="its heads need the states"):
        compose("hybrid", TARGET, options={"parts": "eagle3,prompt-lookup", "heads": str(folder)})
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "fc.weight"}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'fc.weight' is missing"):
        load_head(folder, TARGET)
    save_file({**weights, "fc.weight": weights["fc.weight"][:, :5].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="has shape"):
        load_head(folder, TARGET)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_head(folder, TARGET)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="no draft heads"):
        load_head(folder, TARGET)


def test_heads_of_another_target_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    head = random_head("eagle1")
    object.__setattr__(head.config, "signature", signature_of(TARGET, 32))
    save_head(head, tmp_path / "e")
    assert load_head(tmp_path / "e", TARGET).config.signature
    with pytest.raises(ModelError, match="another target of the same shape"):
        load_head(tmp_path / "e", tiny_model(2.0))


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(random_heads("medusa", tmp_path / "m"))
    before = (folder / "model.safetensors").read_bytes()

    def full(state: object, path: Path, metadata: object = None) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.models.checkpoint.save_file", full)
    with pytest.raises(ModelError, match="last checkpoint is complete"):
        save_head(random_head("medusa", seed=1), folder)
    assert (folder / "model.safetensors").read_bytes() == before and not list(folder.glob("*.new"))


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle1", "eagle3"])
def test_the_bundled_heads_are_accepted_as_training_says(kind: str) -> None:
    """A greedy chain takes exactly the passes that the hits of the training pass over the finished text predict."""
    llm, depth = LLM(method="plain", dtype="float32"), 4
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = llm.codec.encode("Once upon a time, there was a little girl named Lily. She")
    text = llm.generate([prompt], params)[0].token_ids
    head = load_head(bundled_path(f"heads/{kind}"), llm.target)
    objective = HeadObjective(head, llm.target, HeadSettings(num_depths=depth))
    documents = [Document((*prompt, *text))]
    with torch.no_grad():
        rows = DocumentRows(compute(llm.target, documents, objective.taps), documents, row_len=8, last=llm.target.num_layers)
        runs = torch.stack(objective(rows.packed(objective.taps)).hits)[:, 0].int().cumprod(0).sum(0).tolist()
    size, end, passes = len(prompt), len(prompt) + len(text), 0
    while size < end:
        size, passes = size + 1 + min(runs[size - 2], end - size - 1), passes + 1
    output = llm.generate([prompt], params, method=llm.compose(kind, branching="1,1,1,1", num_draft_tokens=depth))[0]
    assert output.token_ids == text and output.stats.num_passes == passes < 30
