"""Write documents in bulk with a small Llama checkpoint.

A fixed batch of slots decodes in lockstep against a static key/value cache, and a slot that ends its story starts the next one
at once. So no row ever idles, and one step can be compiled and replayed as a CUDA graph. The same decoder writes the story
corpus (from stories15M) and the text on which the draft is distilled (from the target).
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

CUT = -1  # recorded where a document ran into the context limit instead of ending by itself
CHUNK = 256  # steps between two looks at the clock; each chunk is one copy to the host


@dataclass(frozen=True)
class LlamaShape:
    """The numbers that define a Llama model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    context: int
    rope_theta: float
    norm_eps: float

    def config(self) -> dict[str, object]:
        """The shape in Hugging Face terms."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class SamplerConfig:
    """How documents are drawn: slot count, context, and the temperature range spread over the slots."""

    batch: int
    context: int
    coolest: float
    hottest: float
    opening: int  # tokens at the start of each document that are drawn at temperature one, for variety
    min_p: float
    seed: int


@dataclass(frozen=True)
class StoriesConfig:
    """How long to write stories, and which of them to keep."""

    sampler: SamplerConfig
    seconds: float
    shortest: int


def read_shape(folder: Path) -> LlamaShape:
    """Read the shape out of a Hugging Face Llama folder."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", 10000.0)}
    return LlamaShape(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        mlp=raw["intermediate_size"],
        context=raw["max_position_embeddings"],
        rope_theta=rope["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def rope_tables(shape: LlamaShape, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, one row per position."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    angle = torch.arange(context, device=device)[:, None] / shape.rope_theta ** (half / shape.head_dim)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head by the angles of its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@dataclass(frozen=True)
class Layer:
    """One block's weights, with the projections that share an input joined into one matrix."""

    norm_in: Tensor
    qkv: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


def join_layer(weights: dict[str, Tensor], index: int) -> Layer:
    """Collect block `index` from Hugging Face names."""
    at = f"model.layers.{index}."
    attn, mlp = at + "self_attn.", at + "mlp."
    return Layer(
        norm_in=weights[at + "input_layernorm.weight"],
        qkv=torch.cat([weights[f"{attn}{name}_proj.weight"] for name in "qkv"]),
        out=weights[attn + "o_proj.weight"],
        norm_mlp=weights[at + "post_attention_layernorm.weight"],
        gate_up=torch.cat([weights[mlp + "gate_proj.weight"], weights[mlp + "up_proj.weight"]]),
        down=weights[mlp + "down_proj.weight"],
    )


class Sampler:
    """A batch of slots, each writing one token per step."""

    def __init__(self, weights: dict[str, Tensor], shape: LlamaShape, config: SamplerConfig, start: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.shape, self.config, self.start = shape, config, start
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        cast = {name: tensor.to(self.device, dtype) for name, tensor in weights.items()}
        self.embed, self.norm = cast["model.embed_tokens.weight"], cast["model.norm.weight"]
        self.layers = [join_layer(cast, i) for i in range(shape.layers)]
        self.cos, self.sin = rope_tables(shape, config.context, self.device)
        size = (config.batch, config.context, shape.kv_heads, shape.head_dim)
        self.keys = [torch.zeros(size, device=self.device, dtype=dtype) for _ in self.layers]
        self.values = [torch.zeros(size, device=self.device, dtype=dtype) for _ in self.layers]
        self._make_state()
        torch.manual_seed(config.seed)
        compiled = torch.compile(self._advance, dynamic=False) if self.on_gpu else self._advance
        self._compiled = compiled
        self._graph: torch.cuda.CUDAGraph | None = None

    def _make_state(self) -> None:
        batch, device = self.config.batch, self.device
        self.rows = torch.arange(batch, device=device)
        self.slots = torch.arange(self.config.context, device=device)
        self.token = torch.full((batch,), self.start, device=device)
        self.pos = torch.zeros(batch, dtype=torch.long, device=device)
        self.age = torch.zeros(batch, dtype=torch.long, device=device)
        self.opening = torch.full((), self.config.opening, device=device)
        self.emitted = torch.zeros(batch, dtype=torch.long, device=device)
        self.heat = torch.linspace(self.config.coolest, self.config.hottest, batch, device=device).clamp_min(1e-3)
        self.noise = torch.empty(batch, self.shape.vocab, device=device)
        # One forced token per position, CUT where the slot may choose; only distillation prompts use it.
        self.forced = torch.full((batch, self.config.context), CUT, device=device)
        self.restart = torch.ones((), dtype=torch.bool, device=device)

    def _attend(self, q: Tensor, index: int) -> Tensor:
        """Attend from the newest token to its slot's cache."""
        keys, values = self.keys[index], self.values[index]
        seen = self.slots[None, :] <= self.pos[:, None]
        if not self.on_gpu:
            k, v, mask = keys.transpose(1, 2), values.transpose(1, 2), seen[:, None, None, :]
            return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True).flatten(1)
        # Compiled, a product and its sum become one pass over the cache; library kernels waste most of a tile on one query.
        grouped = q.unflatten(1, (self.shape.kv_heads, -1))
        scores = (grouped[:, None].float() * keys[:, :, :, None].float()).sum(-1) / math.sqrt(self.shape.head_dim)
        weights = scores.masked_fill(~seen[:, :, None, None], -math.inf).softmax(1)
        return (weights[..., None] * values[:, :, :, None].float()).sum(1).to(q.dtype).flatten(1)

    def _block(self, x: Tensor, index: int) -> Tensor:
        shape, layer = self.shape, self.layers[index]
        qkv = (rms_norm(x, layer.norm_in, shape.norm_eps) @ layer.qkv.T).unflatten(1, (-1, shape.head_dim))
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cos, sin = self.cos[self.pos][:, None], self.sin[self.pos][:, None]
        self.keys[index][self.rows, self.pos] = rotate(k, cos, sin).to(x.dtype)
        self.values[index][self.rows, self.pos] = v
        x = x + self._attend(rotate(q, cos, sin).to(x.dtype), index) @ layer.out.T
        gate, up = (rms_norm(x, layer.norm_mlp, shape.norm_eps) @ layer.gate_up.T).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ layer.down.T

    def _choose(self, logits: Tensor) -> Tensor:
        """Draw from softmax(logits / heat) by the Gumbel trick, without tokens far less likely than the best one."""
        heat = torch.where(self.age < self.opening, 1.0, self.heat)
        scaled = logits.float() / heat[:, None]
        floor = scaled.amax(-1, keepdim=True) + math.log(self.config.min_p)
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
        return (scaled - self.noise.clamp_min(1e-20).log()).argmax(-1)

    def _advance(self) -> None:
        x = self.embed[self.token]
        for index in range(self.shape.layers):
            x = self._block(x, index)
        choice = self._choose(rms_norm(x, self.norm, self.shape.norm_eps) @ self.embed.T)
        full = self.pos + 1 >= self.config.context
        forced = self.forced[self.rows, (self.pos + 1).clamp_max(self.config.context - 1)]
        choice = torch.where(forced >= 0, forced, choice)
        anew = full | ((choice == self.start) & self.restart)
        self.emitted.copy_(torch.where(full, CUT, choice))
        self.age.copy_(torch.where(choice == self.start, 0, self.age + 1))
        self.token.copy_(torch.where(anew, self.start, choice))
        self.pos.copy_(torch.where(anew, 0, self.pos + 1))

    def _step(self) -> None:
        self.noise.exponential_()
        self._compiled()

    @torch.no_grad()
    def step(self) -> None:
        """Write one token in every slot."""
        if self._graph is None and self.on_gpu:
            self._capture()
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and settles allocations before the capture
                self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self.rewind()

    def rewind(self) -> None:
        """Put every slot back to the start of a document."""
        self.pos.zero_()
        self.age.zero_()
        self.token.fill_(self.start)

    @torch.no_grad()
    def record(self, steps: int) -> Tensor:
        """Run `steps` steps; returns what each slot wrote, shaped (batch, steps)."""
        log = torch.empty(steps, self.config.batch, dtype=torch.int16, device=self.device)
        for index in range(steps):
            self.step()
            log[index].copy_(self.emitted)
        return log.T.cpu()

    def continue_from(self, prompts: Tensor, heat: Tensor, opening: int) -> Tensor:
        """Extend prompts (batch, context; CUT where free) to full windows, each slot at its own temperature."""
        self.record(1)  # captures the graph before the state below is set
        self.rewind()
        self.restart.fill_(False)
        self.opening.fill_(opening)
        self.forced.copy_(prompts)
        self.heat.copy_(heat.clamp_min(1e-3))
        self.token.copy_(prompts[:, 0])
        return torch.cat([prompts[:, :1].cpu().short(), self.record(self.config.context - 1)], dim=1)


def split_stories(stream: NDArray[np.int16], start: int, shortest: int) -> list[NDArray[np.int16]]:
    """Cut each slot's stream at its document ends; keep distinct stories that ended by themselves."""
    stream = stream.copy()
    stream[:, -1] = CUT  # a story still open when the clock ran out did not end
    flat = stream.reshape(-1)
    ends = np.flatnonzero((flat == start) | (flat == CUT))
    begins = np.concatenate(([0], ends[:-1] + 1))
    good = (flat[ends] == start) & (ends - begins >= shortest)
    stories: dict[bytes, NDArray[np.int16]] = {}
    for begin, end in zip(begins[good], ends[good], strict=True):
        story = flat[begin:end]
        stories.setdefault(story.tobytes(), story)
    return list(stories.values())


def write_stories(model: Path, out: Path, config: StoriesConfig) -> None:
    """Sample stories until the time is spent; save them in folder `out` as one token array and its offsets."""
    sampler = Sampler(load_file(model / "model.safetensors"), read_shape(model), config.sampler, start=1)
    sampler.step()
    sampler.rewind()
    began, chunks, rate = time.monotonic(), [], 0.0
    while time.monotonic() - began < config.seconds:
        chunks.append(sampler.record(CHUNK).numpy())
        rate = len(chunks) * CHUNK * config.sampler.batch / (time.monotonic() - began)
        if len(chunks) % 8 == 1:
            print(f"stories: {len(chunks) * CHUNK} steps, {rate / 1e3:.0f}k tokens/s", flush=True)
    stories = split_stories(np.concatenate(chunks, axis=1), 1, config.shortest)
    np.random.default_rng(config.sampler.seed).shuffle(stories)
    offsets = np.cumsum([0] + [len(story) for story in stories])
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "tokens.npy", np.concatenate(stories))
    np.save(out / "offsets.npy", offsets)
    print(f"stories: kept {len(stories)}, {offsets[-1] / 1e6:.1f}M tokens, {rate / 1e3:.0f}k tokens/s", flush=True)
