"""Draft models that learn: the module is the decoder, distillation helps, AdaSPEC chooses, the command line works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_train import CORPUS, TARGET
from tiny_pair import _RAW, tiny_model

from outrider.cli.main import main
from outrider.core.errors import ModelError, OptionError
from outrider.core.tree import TokenTree
from outrider.train.distill import DistillSettings, new_distillation
from outrider.train.draft_lm import DraftLM
from outrider.train.features import DocumentRows, compute
from outrider.train.loop import Settings, train


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    """A model folder: one random layer."""
    from outrider.models.config import config_of

    folder = tmp_path_factory.mktemp("draft")
    raw = {**_RAW, "num_hidden_layers": 1}
    config = config_of(raw)
    assert config is not None
    torch.manual_seed(0)
    module = DraftLM(config, raw, folder)
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def rows(documents) -> DocumentRows:
    return DocumentRows(compute(TARGET, documents, ()), documents, row_len=64, last=TARGET.num_layers)


def test_the_module_is_the_decoder(draft: str) -> None:
    module = DraftLM.load(draft, torch.device("cpu"))
    documents = CORPUS.held_out[:1]
    with torch.no_grad():
        logits = module.logits(module(rows(documents).packed(())))[0]
    model, tokens = module.frozen(), list(documents[0].tokens)
    expected = model.score(TokenTree.chain(torch.tensor([tokens])), model.new_cache(1)).logits[0]
    torch.testing.assert_close(logits[: len(tokens)], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("loss", "on_policy"), [("forward", 0.0), ("tvd", 0.0), ("jsd", 0.5)])
def test_distillation_helps(draft: str, tmp_path: Path, loss: str, on_policy: float) -> None:
    objective = new_distillation("distill", TARGET, draft=draft, reference=None, settings=DistillSettings(loss, on_policy))
    settings = Settings(max_steps=30, batch_size=8, judge_every=15, learning_rate=5e-3, warmup_steps=1)
    run = train([objective], TARGET, CORPUS, tmp_path, settings=settings)[0]
    assert run.best > 1.05
    again = DraftLM.load(str(tmp_path / "distill"), torch.device("cpu"))
    assert again.config.num_layers == 1 and (tmp_path / "distill" / "provenance.json").is_file()


def test_on_policy_text_is_the_drafts_own_and_repeats_with_its_step(draft: str) -> None:
    objective = new_distillation("distill", TARGET, draft=draft, reference=None, settings=DistillSettings(on_policy=0.5))
    given = CORPUS.train[:4]
    first, again, other = (objective.write(given, step) for step in (3, 3, 4))
    assert list(first) == list(again) != list(other)
    assert list(first[2:]) == list(given[2:]) and first[0].tokens[: first[0].begin] == given[0].tokens[: first[0].begin]


def test_adaspec_learns_from_the_places_that_can_be_learned(draft: str) -> None:
    settings = DistillSettings(kept=0.25)
    objective = new_distillation("adaspec", TARGET, draft=draft, reference=draft, settings=settings)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :4] = False
    gain = torch.arange(16.0).view(2, 8)
    assert objective._learnable(gain, valid).nonzero().tolist() == [[1, 5], [1, 6], [1, 7]]
    batch = rows(CORPUS.held_out[:3]).packed(())
    with torch.no_grad():  # the draft is its own reference: no place is better than another
        learned = objective(batch).loss
        objective.module.eval()
        assert torch.isfinite(learned) and learned > 0 and torch.isfinite(objective(batch).loss)


def test_wrong_drafts_are_refused(draft: str) -> None:
    with pytest.raises(OptionError, match="give --draft"):
        new_distillation("distill", TARGET, draft=None, reference=None, settings=DistillSettings())
    with pytest.raises(OptionError, match="give --reference"):
        new_distillation("adaspec", TARGET, draft=draft, reference=None, settings=DistillSettings())
    with pytest.raises(ModelError, match="same vocabulary"):
        new_distillation("distill", tiny_model(vocab_size=40), draft=draft, reference=None, settings=DistillSettings())


def test_the_command_line_regenerates_trains_and_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled target, far too briefly to be any good."""
    data, own, out = tmp_path / "texts.jsonl", tmp_path / "own.jsonl", tmp_path / "heads"
    answer = {"role": "assistant", "content": "no"}
    chats = [{"messages": [{"role": "user", "content": f"Tell me story {i}."}, answer]} for i in range(5)]
    data.write_text("".join(json.dumps(value) + "\n" for value in [*chats, "Once upon a time there was a dog."]))
    arguments = ["--data", str(data), "--out", str(own), "--max-tokens", "20", "--prompt-len", "4"]
    assert main(["train", "regenerate", *arguments]) == 0
    lines = own.read_text().splitlines()
    assert len(lines) == 6 and all(len(json.loads(line)["tokens"]) > json.loads(line)["prompt_len"] for line in lines)
    own.write_text("\n".join(lines[:4]) + "\n" + lines[4][:9])  # killed in the middle of a line
    assert main(["train", "regenerate", *arguments]) == 0
    assert own.read_text().splitlines() == lines
    few = "-O max_steps=2 -O batch_size=2 -O judge_every=1 -O num_depths=2 -O draft_vocab_size=512 --max-len 32 --held-out 2"
    assert main(["train", "medusa,eagle3", "--data", str(own), "--out", str(out), *few.split()]) == 0
    assert "tokens per pass" in capsys.readouterr().out
    assert main(["generate", "Once", "--method", "eagle3", "-O", f"heads={out / 'eagle3'}", "-n", "8"]) == 0
    capsys.readouterr()
    for bad, word in ((["medusaa"], "did you mean 'medusa'"), (["medusa", "-O", "max_step=1"], "did you mean 'max_steps'")):
        assert main(["train", *bad, "--data", str(own), "--out", str(tmp_path / "x")]) == 2
        assert word in capsys.readouterr().err
