"""A small causal model whose tokens are vectors: a transformer gives each token's condition, an MLP removes its noise.

The layout is MAR's with a causal order (Li et al. 2024, arXiv 2406.11838): the head is conditioned on the transformer's output
and the step, and learns to predict the noise of a token at a random step. Widths are those of the schedule, not learned, so
that target and draft share them.

    z_i = transformer(class, x_1 .. x_{i-1})           loss = |noise - head(x_i noised at t, t, z_i)|^2

``Network.conditions`` reads a whole prefix at once and keeps nothing: it is what training uses, and the oracle of tests.
``Network.score`` reads what follows a cache, with the project's own key-value cache, and equals it to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.slots import LayeredCache
from outrider.core.errors import ModelError
from outrider.core.interfaces import Cache
from outrider.images.continuous.interfaces import ContinuousTarget
from outrider.images.continuous.paths import Chain, Schedule
from outrider.models.checkpoint import write_checkpoint
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder

KIND = "continuous-image"
_SPARE = 16
"""Spare slots of a cache after the last token, for guesses of rows that are nearly complete."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries over keys and values, each [B, heads, N, D]."""
causal: Attend = partial(F.scaled_dot_product_attention, is_causal=True)
"""Causal attention: every node sees earlier nodes and itself."""


@dataclass(frozen=True)
class ContinuousShape:
    """Sizes of a model."""

    num_tokens: int = 16
    dim: int = 4
    num_classes: int = 10
    width: int = 96
    num_layers: int = 3
    num_heads: int = 3
    head_width: int = 128
    head_layers: int = 2


class _Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, shape: ContinuousShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 3 * shape.width), nn.Linear(3 * shape.width, shape.width)

    def forward(self, x: Tensor, attend: Attend = causal) -> Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = attend(*parts)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class _HeadBlock(nn.Module):
    """A residual MLP whose norm is scaled and shifted by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, -1)
        return x + gate * self.down(F.silu(self.up(self.norm(x) * (1 + scale) + shift)))


class Network(nn.Module):
    """The parameters of transformer and diffusion head."""

    def __init__(self, shape: ContinuousShape) -> None:
        super().__init__()
        self.shape = shape
        self.enter, self.label = nn.Linear(shape.dim, shape.width), nn.Embedding(shape.num_classes, shape.width)
        self.places = nn.Parameter(0.02 * torch.randn(shape.num_tokens, shape.width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.leave = nn.Linear(shape.width, shape.head_width)
        self.noisy, self.time = nn.Linear(shape.dim, shape.head_width), nn.Linear(32, shape.head_width)
        self.head = nn.ModuleList(_HeadBlock(shape.head_width) for _ in range(shape.head_layers))
        self.noise = nn.Linear(shape.head_width, shape.dim)

    def conditions(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[B, N + 1, H] conditions from the first N tokens."""
        x = torch.cat([self.label(labels)[:, None], self.enter(tokens)], 1)
        x = x + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

    def score(self, nodes: Tensor, labels: Tensor, cache: LayeredCache) -> Tensor:
        """[B, N, H] the condition after each node [B, N, D] of chains that follow the committed tokens. The first entry is the
        class."""
        cache.reserve(nodes.shape[1])
        places = torch.tensor(cache.lengths)[:, None] + torch.arange(nodes.shape[1])
        x = torch.where((places == 0)[..., None], self.label(labels)[:, None], self.enter(nodes))
        x = x + self.places[places.clamp(max=self.shape.num_tokens - 1)]
        for layer, block in enumerate(self.blocks):
            x = block(x, partial(_attend_cached, cache, layer, places))
        return self.leave(x)

    def predicted_noise(self, x: Tensor, share: Tensor, conditions: Tensor) -> Tensor:
        """[M, D] the predicted noise in points [M, D]. ``share`` [M] is the signal's share of their variance."""
        waves = (share.sqrt() * math.pi / 2)[:, None] * torch.arange(1, 17, device=x.device)
        condition = conditions + self.time(torch.cat([waves.sin(), waves.cos()], -1).to(x.dtype))
        hidden = self.noisy(x)
        for block in self.head:
            hidden = block(hidden, condition)
        return self.noise(hidden)


def _attend_cached(cache: LayeredCache, layer: int, places: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of nodes at ``places`` [B, N], whose keys are written to the cache. Each node sees all slots up to its own."""
    keys, values = cache.write(layer, keys, values)
    seen = torch.arange(keys.shape[2]) <= places[..., None]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None])


def diffusion_loss(network: Network, tokens: Tensor, labels: Tensor, chance: torch.Generator, *, repeats: int = 4) -> Tensor:
    """Squared error of the predicted noise, each token at ``repeats`` random amounts of noise."""
    conditions = network.conditions(tokens[:, :-1], labels).flatten(0, 1).repeat(repeats, 1)
    clean = tokens.flatten(0, 1).repeat(repeats, 1)
    angle = torch.rand(len(clean), generator=chance).to(clean.device) * math.pi / 2
    share, noise = angle.cos().square().clamp(1e-4, 1 - 1e-5), torch.randn(clean.shape, generator=chance).to(clean.device)
    mixed = share.sqrt()[:, None] * clean + (1 - share).sqrt()[:, None] * noise
    return F.mse_loss(network.predicted_noise(mixed, share, conditions), noise)


@final
class HeadChain(Chain):
    """The diffusion head under M conditions."""

    def __init__(self, network: Network, conditions: Tensor, schedule: Schedule) -> None:
        self.network, self.conditions, self.schedule = network, conditions, schedule
        self.num_rows, self.dim, self.dtype = len(conditions), network.shape.dim, conditions.dtype

    def mean(self, x: Tensor, t: int) -> Tensor:
        steps = torch.tensor([t])
        share = self.schedule.signal[steps]
        noise = self.network.predicted_noise(x, share.to(x.dtype), self.conditions)
        wide = share[:, None].to(x.dtype)
        clean = ((x - (1 - wide).sqrt() * noise) / wide.sqrt()).clamp(-2, 2)  # tokens are pixels in -1 .. 1
        return self.schedule.mean(x, steps, clean)

    def select(self, rows: Tensor) -> HeadChain:
        return HeadChain(self.network, self.conditions[rows], self.schedule)


@final
class DiffusionModel(ContinuousTarget):
    """A trained network with a noise schedule."""

    def __init__(self, network: Network, schedule: Schedule) -> None:
        self.network, self.schedule = network.eval().requires_grad_(False), schedule
        self.num_tokens, self.dim, self.dtype = network.shape.num_tokens, network.shape.dim, network.places.dtype
        self.num_classes = network.shape.num_classes

    def new_cache(self, batch_size: int) -> ContiguousCache:
        shape = self.network.shape
        sizes = (batch_size, shape.num_heads, self.num_tokens + _SPARE, shape.width // shape.num_heads)
        return ContiguousCache(torch.zeros(shape.num_layers, 2, *sizes, dtype=self.dtype), [0] * batch_size)

    def score(self, nodes: Tensor, labels: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, LayeredCache), "made by new_cache"
        return self.network.score(nodes, labels, cache)

    def conditions(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.network.conditions(tokens, labels)

    def chain(self, conditions: Tensor) -> HeadChain:
        return HeadChain(self.network, conditions, self.schedule)

    @staticmethod
    def load(folder: str | Path, schedule: Schedule) -> DiffusionModel:
        """The model in a folder. Any schedule may be used with it."""
        path = Path(folder)
        own = read_config(path).get("outrider") or {}
        if own.get("kind") != KIND:
            raise ModelError(f"{folder} holds no continuous image model; make one: python recipes/images_continuous.py --help")
        network, source = Network(ContinuousShape(**own["shape"])), SafetensorsFolder(path)
        state = {name: source.take(name, *tensor.shape) for name, tensor in network.state_dict().items()}
        network.load_state_dict(state)
        return DiffusionModel(network, schedule)


def save_network(network: Network, folder: Path, notes: dict[str, object]) -> None:
    """A folder that ``DiffusionModel.load`` reads."""
    config = {"outrider": {"kind": KIND, "shape": asdict(network.shape)}}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_checkpoint(folder, tensors, config=config, notes=notes)
