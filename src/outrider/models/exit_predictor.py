"""Predicts whether the whole target agrees with an exit: a small network per layer, which reads the exit's probabilities of a
few tokens.

SpecEE (Xu et al. 2025, arXiv 2504.08850) asks, layer by layer, whether the layers above would still change the token. A network
of one hidden layer reads three numbers for each of k speculated tokens. They are its probability, its probability among the k,
and how that has changed since the layer that was evaluated before. Here the k tokens are the exit's own likeliest.

    x_l = [log p_l(t_i),  r_l(t_i),  r_l(t_i) - r_m(t_i)]  for i = 1 .. k,    r = softmax over the k tokens, m the layer before
    chance_l = sigmoid(w2 . relu(W1 x_l + b1) + b2)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.models.checkpoint import write_checkpoint
from outrider.models.heads.folder import signature_of
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder

_CLOSE = 0.98
"""Stored signature and target are different models below this cosine."""
_TRAIN = "outrider train specee --target MODEL --data TEXTS --out DIR"


class ExitJudge(Protocol):
    """Predicts how far exits can be trusted."""

    num_tokens: int
    """k: number of tokens it looks at."""

    def chances(self, layer: int, features: Tensor) -> Tensor:
        """[B] probability that the target agrees with the exit after ``layer``, given ``features`` [B, 3 k]."""
        ...

    def scheduled(self, num_exits: int) -> tuple[int, ...]:
        """The layers at which to predict, ascending."""
        ...


def exit_features(logits: Tensor, before: Tensor | None, num_tokens: int) -> Tensor:
    """[..., 3 k] features of an exit with ``logits`` [..., V]; ``before`` are the logits of the exit before it."""
    best = logits.float().log_softmax(-1).topk(min(num_tokens, logits.shape[-1]), -1)
    ranks = best.values.softmax(-1)
    earlier = ranks if before is None else before.float().gather(-1, best.indices).softmax(-1)
    return torch.cat([best.values, ranks, ranks - earlier], -1)


def exit_layers(given: Sequence[int] | str | None, num_layers: int, *, most: int) -> tuple[int, ...]:
    """The ``given`` exits, ascending ("2,4,8" on the command line). Default: about ``most``, evenly spaced."""
    last = max(1, num_layers - 1)
    if given is None:
        return tuple(range(max(1, num_layers // most), last + 1, max(1, num_layers // most)))
    try:
        found = sorted({int(part) for part in (given.split(",") if isinstance(given, str) else given)})
    except (TypeError, ValueError):
        raise OptionError(f"exits = {given!r} is not valid; write layer numbers with commas between them") from None
    wrong = next((layer for layer in found if not 1 <= layer <= last), None)
    if wrong is not None or not found:
        raise OptionError(f"exits = {given!r} is not valid; the target has {num_layers} layers, use numbers from 1 to {last}")
    return tuple(found)


@final
class SureExits(ExitJudge):
    """Stands in for a trained predictor: the probability is the exit's own confidence."""

    num_tokens = 1

    def __init__(self, exits: Sequence[int]) -> None:
        self.exits = tuple(exits)

    def chances(self, layer: int, features: Tensor) -> Tensor:
        del layer
        return features[..., 0].exp()

    def scheduled(self, num_exits: int) -> tuple[int, ...]:
        """Evenly spaced layers, including the deepest."""
        step = -(-len(self.exits) // num_exits)
        return self.exits[::-1][::step][::-1]


@final
class ExitPredictor(nn.Module):
    """A network per exit, and how often each exit was the first to be right."""

    def __init__(self, exits: Sequence[int], *, num_tokens: int = 4, width: int = 64) -> None:
        super().__init__()
        self.exits, self.num_tokens, self.width = tuple(exits), num_tokens, width
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * num_tokens, width), nn.ReLU(), nn.Linear(width, 1)) for _ in self.exits
        )
        self.first_right: Tensor
        self.register_buffer("first_right", torch.zeros(len(self.exits)))

    def forward(self, index: int, features: Tensor) -> Tensor:
        """[...] log-odds that the exit of this number is right."""
        return self.networks[index](features)[..., 0]

    def chances(self, layer: int, features: Tensor) -> Tensor:
        with torch.inference_mode():
            return self(self.exits.index(layer), features).sigmoid()

    def scheduled(self, num_exits: int) -> tuple[int, ...]:
        """The exits that were most often the first to be right, and the deepest one."""
        order = sorted(range(len(self.exits) - 1), key=lambda index: -float(self.first_right[index]))
        return tuple(self.exits[index] for index in sorted(order[: num_exits - 1])) + self.exits[-1:]

    def save(self, folder: Path, target: Target, hidden_size: int, notes: dict[str, Any]) -> None:
        facts = {
            "kind": "specee",
            "exits": list(self.exits),
            "num_tokens": self.num_tokens,
            "width": self.width,
            "hidden_size": hidden_size,
            "target_layers": target.num_layers,
            "signature": list(signature_of(target, hidden_size)),
        }
        state = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_checkpoint(folder, state, config={"outrider": facts}, notes=notes)


def load_exit_predictor(folder: str, target: Target) -> ExitPredictor:
    """The predictor in a folder, checked against the target and on its device."""
    path = Path(folder)
    own = read_config(path).get("outrider") or {}
    if own.get("kind") != "specee":
        raise ModelError(f"{folder} holds no predictor of early exits; train one: {_TRAIN}")
    if own["target_layers"] != target.num_layers or not _is_of(own, target):
        raise ModelError(f"{folder} was trained for another target; use that one, or train one: {_TRAIN}")
    predictor = ExitPredictor(own["exits"], num_tokens=own["num_tokens"], width=own["width"])
    source = SafetensorsFolder(path)
    state = {name: source.take(name, *tensor.shape).float() for name, tensor in predictor.state_dict().items()}
    predictor.load_state_dict(state)
    return predictor.to(target.device).requires_grad_(False)


def _is_of(own: dict[str, Any], target: Target) -> bool:
    try:
        mine = torch.tensor(signature_of(target, int(own["hidden_size"])))
    except RuntimeError:  # a target of another width
        return False
    return float(mine @ torch.tensor(cast("list[float]", own["signature"]))) >= _CLOSE
