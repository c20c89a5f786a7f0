"""Train the bundled target, and distil the bundled drafts from it.

Both loops run until a time budget is spent. The learning rate falls with the share of the budget that is gone. The last part
uses long windows, so that the whole context is trained. Drafts learn the target's distribution on corpus text and on text the
target wrote itself. Two candidates learn side by side, so that they share the costly part, the target's forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bundled_stories import CUT, LlamaShape, Sampler, SamplerConfig, rms_norm, rope_tables, rotate
from torch import Tensor, nn

EOT_ID, ASSISTANT_ID, END_ID = 0, 2, 4  # the tokenizer numbers its special tokens first


@dataclass(frozen=True)
class TrainConfig:
    """One training run: its time, its windows and its optimiser."""

    seconds: float
    tokens_per_step: int
    window: int
    long_window: int
    long_share: float  # of the time, at the end
    rate: float
    warmup_steps: int
    decay: float
    clip: float
    seed: int


@dataclass(frozen=True)
class DistillConfig:
    """What the drafts learn from, and how the parts of their loss weigh."""

    train: TrainConfig
    sampler: SamplerConfig
    rounds: int  # of target-written windows, one batch of the sampler each
    own_share: float  # of each step's windows
    divergence: float
    variation: float
    data: float


class Norm(nn.Module):
    """Root-mean-square normalisation that keeps its input's precision outside."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """The gated feed-forward part of a block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def run_block(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer as a function: compiled once, it serves all layers of that size."""
    return block(x, cos, sin)


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = Feed(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama whose parameters carry the Hugging Face names below `model.`; the output head is the embedding."""

    def __init__(self, shape: LlamaShape, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.run_block = compiled(run_block, device)
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                closing = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if closing else 0.02)
        self.to(device)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        x = x.bfloat16() if x.is_cuda else x  # halves the traffic of the residual stream
        for layer in self.layers:
            x = self.run_block(layer, x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the parameters under their full Hugging Face names, in bfloat16."""
        state = self.state_dict().items()
        return {f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).clone() for name, tensor in state}


class Windows:
    """Training windows that each begin at a document, with or without the mark that opens it."""

    def __init__(self, tokens: Tensor, starts: Tensor, seed: int) -> None:
        self.tokens, self.starts = tokens, starts
        self.usable: dict[int, int] = {}
        self.generator = torch.Generator(device=tokens.device).manual_seed(seed)

    @classmethod
    def load(cls, path: Path, device: torch.device, seed: int) -> Windows:
        tokens = torch.from_numpy(np.load(f"{path}.npy").astype(np.int32)).to(device)
        return cls(tokens, torch.from_numpy(np.load(f"{path}_starts.npy")).to(device), seed)

    def draw(self, count: int, window: int) -> Tensor:
        """Random windows. Half leave out the opening mark, because prompts come both ways."""
        device = self.tokens.device
        if window not in self.usable:  # looked up once, because reading it waits for the device
            self.usable[window] = max(1, int(torch.searchsorted(self.starts, len(self.tokens) - window - 2)))
        begin = self.starts[torch.randint(self.usable[window], (count,), device=device, generator=self.generator)]
        begin = begin + torch.randint(2, (count,), device=device, generator=self.generator)
        return self.tokens[(begin[:, None] + torch.arange(window + 1, device=device)).clamp_max(len(self.tokens) - 1)].long()


def new_optimizer(models: list[Llama], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": config.decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95), fused=fused)


def amp(device: torch.device) -> torch.autocast:
    """Mixed precision where it is fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Compile on a GPU; elsewhere the compilation would take longer than a smoke run."""
    torch._dynamo.config.recompile_limit = 64  # blocks of three sizes, two windows, with and without gradient
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def run_steps(name: str, models: list[Llama], losses: Callable[[int], Tensor], config: TrainConfig) -> dict[str, float]:
    """Step until the time is spent. `losses(window)` gives one value per model for fresh windows of that length."""
    optimizer = new_optimizer(models, config)
    for window in (config.window, config.long_window):  # compile both shapes before the clock starts
        losses(window).sum().backward()
        optimizer.zero_grad(set_to_none=True)
    began, step, progress, shown = time.monotonic(), 0, 0.0, [0.0]
    while progress < 1.0:
        window = config.window if progress < 1 - config.long_share else config.long_window
        warm = min(1.0, (step + 1) / config.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.rate * warm * (1 - 0.98 * progress)
        loss = losses(window)
        loss.sum().backward()
        for model in models:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            shown = loss.tolist()  # also waits for the device, so that the clock is honest
        progress = (time.monotonic() - began) / config.seconds
        if step % 100 == 0:
            speed = step * config.tokens_per_step / (time.monotonic() - began)
            text = " ".join(f"{value:.4f}" for value in shown)
            print(f"{name}: step {step} loss {text} {speed / 1e3:.0f}k tokens/s {100 * progress:.0f}%", flush=True)
    tokens = float(step * config.tokens_per_step)
    return {"steps": float(step), "tokens": tokens, "seconds": time.monotonic() - began, "last_loss": shown[0]}


def text_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean loss per token."""
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def train_target(shape: LlamaShape, work: Path, config: TrainConfig) -> tuple[Llama, dict[str, float]]:
    """Train the target on the corpus by next-token prediction."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(shape, device)
    windows = Windows.load(work / "train", device, config.seed)
    cos, sin = rope_tables(shape, config.long_window, device)

    score = compiled(text_loss, device)

    def losses(window: int) -> Tensor:
        ids = windows.draw(config.tokens_per_step // window, window)
        with amp(device):
            return score(model(ids[:, :-1], cos[:window], sin[:window]), ids[:, 1:])[None]

    report = run_steps("target", [model], losses, config)
    return model, report | held_out_losses(model, work)


@torch.no_grad()
def held_out_losses(model: Llama, work: Path) -> dict[str, float]:
    """Mean loss per token on the held-out documents of each kind."""
    device = model.norm.weight.device
    found = {}
    window = min(1024, model.shape.context)
    cos, sin = rope_tables(model.shape, window, device)
    for path in sorted(work.glob("held_*_starts.npy")):
        kind = path.name.removeprefix("held_").removesuffix("_starts.npy")
        windows = Windows.load(work / f"held_{kind}", device, 0)
        ids = windows.draw(min(64, len(windows.starts)), min(window, len(windows.tokens) // 2))
        with amp(device):
            logits = torch.cat([model(row[:, :-1], cos[: ids.shape[1] - 1], sin[: ids.shape[1] - 1]) for row in ids.split(8)])
        found[f"held_{kind}"] = text_loss(logits, ids[:, 1:]).item()
    return found


def prompt_lengths(prompts: Tensor, answer_share: float) -> Tensor:
    """Where each prompt ends: at a random place, or where the first answer of a conversation begins."""
    count, context = prompts.shape
    length = torch.randint(4, max(5, context // 2), (count,), device=prompts.device)
    answers = prompts[:, : 3 * context // 4] == ASSISTANT_ID
    begin = answers.int().argmax(-1) + 2  # behind the mark and its line break
    chosen = answers.any(-1) & (torch.rand(count, device=prompts.device) < answer_share)
    return torch.where(chosen, begin, length)


def continue_windows(sampler: Sampler, source: Windows, answer_share: float, opening: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of `source` that the sampler's model continued: tokens, prompt lengths, temperatures."""
    batch, context = sampler.config.batch, sampler.config.context
    prompts = source.draw(batch, context - 1)
    length = prompt_lengths(prompts, answer_share)
    # More than a quarter of the slots choose greedily and some at temperature one: the two common ways to ask.
    heat = (torch.rand(batch, device=prompts.device) * 1.75 - 0.5).clamp(0, 1)
    masked = prompts.masked_fill(torch.arange(context, device=prompts.device) >= length[:, None], CUT)
    return sampler.continue_from(masked, heat, opening), length.cpu(), heat.cpu()


def overlap_loss(draft: Tensor, target: Tensor, ids: Tensor, config: DistillConfig) -> Tensor:
    """Divergence from the target, plus one minus the chance that a proposal is accepted, plus loss on the text."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    variation = 1 - torch.minimum(p, q).sum(-1).mean()
    data = -log_q.gather(-1, ids[..., None]).mean()
    return config.divergence * divergence + config.variation * variation + config.data * data


def start_draft(shape: LlamaShape, target: Llama) -> Llama:
    """A draft that begins with the target's embedding, which it shares the meaning of."""
    draft = Llama(shape, target.norm.weight.device)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.embed_tokens.weight)
    return draft


def distil_drafts(sampler: Sampler, target: Llama, drafts: list[Llama], work: Path, config: DistillConfig) -> dict[str, float]:
    """Train all drafts at once against the same target outputs."""
    device, train = target.norm.weight.device, config.train
    corpus = Windows.load(work / "train", device, train.seed)
    began = time.monotonic()
    rounds = [continue_windows(sampler, corpus, 0.5, config.sampler.opening)[0] for _ in range(config.rounds)]
    own = torch.cat(rounds).to(device)
    print(f"draft: target wrote {own.numel() / 1e6:.1f}M tokens in {time.monotonic() - began:.0f} s", flush=True)
    cos, sin = rope_tables(target.shape, train.long_window, device)
    score = compiled(overlap_loss, device)

    def losses(window: int) -> Tensor:
        count = train.tokens_per_step // window
        ids = corpus.draw(count, window)
        if window < own.shape[1]:  # the target's own windows are shorter than the long ones
            mine = int(count * config.own_share)
            ids[:mine] = own[torch.randint(len(own), (mine,), device=device), : window + 1].long()
        seen, here = ids[:, :-1], (cos[:window], sin[:window])
        with amp(device):
            with torch.no_grad():
                truth = target(seen, *here)
            return torch.stack([score(draft(seen, *here), truth, ids[:, 1:], config) for draft in drafts])

    return run_steps("draft", drafts, losses, train)


def accepted_per_round(rows: list[list[bool]], longest: int) -> float:
    """Mean proposals accepted per round when rounds of `longest` proposals walk along rows of agreements."""
    accepted = rounds = 0
    for row in rows:
        at = 0
        while at + longest <= len(row):
            run = next((i for i, same in enumerate(row[at : at + longest]) if not same), longest)
            accepted, rounds, at = accepted + run, rounds + 1, at + run + 1
    return accepted / max(1, rounds)


def answer_mask(ids: Tensor, length: Tensor) -> Tensor:
    """Marks the positions that predict the continuation, from the prompt's end to the first stop token."""
    places = torch.arange(ids.shape[1])
    behind = places >= length[:, None]
    stopped = (((ids == EOT_ID) | (ids == END_ID)) & behind).int().cumsum(1)
    inside = behind & ((stopped == 0) | ((stopped == 1) & ((ids == EOT_ID) | (ids == END_ID))))
    return inside[:, 1:]


@torch.no_grad()
def measure_drafts(sampler: Sampler, target: Llama, drafts: list[Llama], work: Path) -> dict[str, float]:
    """How often proposals would be accepted on held-out prompts that the target continues, by kind of prompt."""
    device, found = target.norm.weight.device, {}
    cos, sin = rope_tables(target.shape, sampler.config.context - 1, device)
    for kind in ("story", "chat"):
        source = Windows.load(work / f"held_{kind}", device, 7)
        ids, length, heat = (part[:256] for part in continue_windows(sampler, source, 1.0, 0))
        ids, inside = ids.long(), answer_mask(ids, length)
        with amp(device):
            p, *qs = (model(ids[:, :-1].to(device), cos, sin).float().softmax(-1) for model in [target, *drafts])
        cold, hot = heat == 0, heat == 1
        for index, q in enumerate(qs):
            agree, share = (p.argmax(-1) == q.argmax(-1)).cpu(), torch.minimum(p, q).sum(-1).cpu()
            rows = [row[mark].tolist() for row, mark in zip(agree[cold], inside[cold], strict=True)]
            found[f"{kind}_draft{index}_greedy_agreement"] = agree[cold][inside[cold]].float().mean().item()
            found[f"{kind}_draft{index}_acceptance"] = share[hot][inside[hot]].mean().item()
            found[f"{kind}_draft{index}_accepted_of_4"] = accepted_per_round(rows, 4)
    return found
