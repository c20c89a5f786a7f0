"""Will the target accept this guess? A small network on the draft's last state and its guess, for policies that stop drafting.

SpecDec++ (Huang et al. 2024, arXiv 2405.19715) puts residual blocks on the draft's last state. A policy sees logits, not
states, but states can be computed from logits. Logits are l = W s with more tokens than dimensions, so s = W^+ l, and the first
matrix A of the head folds into A W^+. So the head needs only the drafter's law, and costs less than the draft's own output
matrix.

    a(guess) = sigmoid(w . blocks(A s + B e(guess) + c log q(guess))),        A s = (A W^+) l,   B e(.) one row per token
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import ModelError
from outrider.core.sampling import Law
from outrider.models.checkpoint import write_checkpoint
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder

_BANNED = 30.0
"""Banned tokens count as this many nats less likely than the likeliest."""


@final
class AcceptanceHead(nn.Module):
    """Residual blocks on the features of a guess. Reads states in training and logits afterwards."""

    def __init__(self, vocab_size: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.of_state = nn.Linear(vocab_size, width)
        """Reads the logits. In training its weight is A and its input is the state (see ``of_draft``)."""
        self.of_guess = nn.Embedding(vocab_size, width)
        self.of_chance = nn.Linear(1, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.out = nn.Linear(width, 1)

    @staticmethod
    def of_draft(hidden_size: int, vocab_size: int, *, width: int, num_blocks: int, seed: int = 0) -> AcceptanceHead:
        """An untrained head for a draft's states."""
        torch.manual_seed(seed)
        head = AcceptanceHead(vocab_size, width, num_blocks)
        head.of_state = nn.Linear(hidden_size, width)
        nn.init.normal_(head.of_guess.weight, std=0.02)
        for block in head.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.zeros_(block.weight)
        return head

    def forward(self, states: Tensor, guesses: Tensor, log_q: Tensor) -> Tensor:
        """[...] log-odds of acceptance."""
        x = self.of_state(states) + self.of_guess(guesses) + self.of_chance(log_q[..., None])
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(F.silu(x))[..., 0]

    def predict(self, law: Law, guesses: Tensor) -> list[float]:
        """Probability that each row's guess [B], drawn from the law, is accepted."""
        logits = law.adjusted[:, -1].float()
        if logits.device != self.out.weight.device:
            self.to(logits.device)
        logits = torch.where(logits.isneginf(), logits.amax(-1, keepdim=True) - _BANNED, logits)
        with torch.inference_mode():
            log_q = logits.gather(-1, guesses[:, None])[:, 0] - logits.logsumexp(-1)
            return self(logits, guesses, log_q).sigmoid().tolist()

    def folded(self, readout: Tensor) -> AcceptanceHead:
        """The head for logits instead of states. ``readout`` [V, H] is the draft's output matrix."""
        width, vocab_size = self.of_guess.embedding_dim, self.of_guess.num_embeddings
        head = AcceptanceHead(vocab_size, width, len(self.blocks))
        state = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        inverse = torch.linalg.pinv(readout.detach().cpu().double())
        state["of_state.weight"] = (state["of_state.weight"].double() @ inverse).float()
        head.load_state_dict(state)
        return head.requires_grad_(False)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write a folded head, complete or not at all."""
        state = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in self.state_dict().items()}
        facts = {
            "kind": "acceptance-head",
            "vocab_size": self.of_guess.num_embeddings,
            "width": self.of_guess.embedding_dim,
            "num_blocks": len(self.blocks),
        }
        write_checkpoint(folder, state, config={"outrider": facts}, notes=notes)


def load_acceptance_head(folder: str) -> AcceptanceHead:
    """The head in a folder, on the CPU. It moves to the device of the first law it reads."""
    path = Path(folder)
    own = read_config(path).get("outrider") or {}
    if own.get("kind") != "acceptance-head":
        raise ModelError(f"{folder} holds no acceptance head; train one: outrider train acceptance-head")
    head, source = AcceptanceHead(own["vocab_size"], own["width"], own["num_blocks"]), SafetensorsFolder(path)
    head.load_state_dict({name: source.take(name, *tensor.shape).float() for name, tensor in head.state_dict().items()})
    return head.requires_grad_(False)
