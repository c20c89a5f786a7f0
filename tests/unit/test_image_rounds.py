"""Images in captured rounds: guided or not, from prompts of one token, with the codes that the host's rounds give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from played_rounds import play_rounds
from triton_interpreter import DEVICE

from outrider.core.interfaces import Target
from outrider.cuda_graphs import Rounds, captured
from outrider.images.codebook import Codebook
from outrider.images.model import ImageModel
from outrider.models.decoder import Decoder
from outrider.models.gpu import decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights

NUM_CODES, NUM_CLASSES = 12, 3
CONFIG = replace(tiny_config(num_hidden_layers=1, max_position_embeddings=64), vocab_size=NUM_CODES + NUM_CLASSES + 1)
NewModel = Callable[[Any, Any], Target]


def image_model(guidance: float, target: NewModel, draft: NewModel) -> ImageModel:
    codes = torch.rand(NUM_CODES, 4, generator=torch.Generator().manual_seed(0))
    book = Codebook(codes, side=4, patch=2, channels=1)
    weights = [tiny_weights(CONFIG, device=str(DEVICE), noise=noise) for noise in (0.0, 0.2)]
    second = draft(CONFIG, weights[1])
    return ImageModel(target(CONFIG, weights[0]), book, num_classes=NUM_CLASSES, guidance=guidance, draft=second)


def codes_of(model: ImageModel, name: str) -> list[list[int]]:
    options = {} if name == "plain" else {"num_draft_tokens": 2}
    pictures = model.imagine([0, 2], model.compose(name, options=options), model.params(seed=7), max_batch_size=2)
    return [picture.tokens for picture in pictures]


@pytest.mark.parametrize(("name", "guidance"), [("plain", 3.0), ("jacobi", 3.0), ("draft-model", 1.0), ("draft-tree", 3.0)])
def test_codes_are_those_of_the_hosts_rounds(name: str, guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = codes_of(image_model(guidance, Decoder, Decoder), name)
    play_rounds(monkeypatch)
    monkeypatch.setattr(decoder, "_BEYOND", 48)  # an interpreted kernel visits every place that there may ever be
    model = image_model(guidance, FastDecoder, FastDecoder if guidance == 1.0 else Decoder)
    made: list[Any] = []

    def graphs_of(_: Rounds, method: Any) -> Any:
        made.append(made[0] if made else captured(method, model.target))
        return made[0]

    monkeypatch.setattr(Rounds, "graphs_of", graphs_of)
    assert codes_of(model, name) == expected
    assert sum(one.num_launched for one in made[0]._rounds.values()) > 2


def test_rules_and_models_without_a_twin_take_the_host() -> None:
    guided = image_model(3.0, FastDecoder, Decoder)
    assert captured(guided.compose("plain"), guided.target) is not None
    assert captured(guided.compose("sjd"), guided.target) is None
    slow = image_model(3.0, Decoder, Decoder)
    assert captured(slow.compose("plain"), slow.target) is None
