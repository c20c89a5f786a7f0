"""A codebook of image patches: an image becomes a raster of codes, and codes become an image again.

Patches are clustered by k-means (Lloyd 1982). A patch is encoded as its nearest centre, so the codebook is the plainest vector
quantiser: no network, trained in seconds. Codes are sorted by brightness, so that neighbours in number are near in grey.

    encode: x -> argmin_k |x - c_k|^2          decode: k -> c_k
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import ModelError, OptionError

FILE = "codebook.safetensors"
_ROWS = 1 << 14
"""Number of patches that are compared with all codes at once."""


@final
@dataclass(frozen=True, eq=False)
class Codebook:
    """Centres of patches, for square images of one size."""

    codes: Tensor
    """[K, patch * patch * channels] float32, in 0 .. 1."""
    side: int
    """Pixels along an edge of an image."""
    patch: int
    """Pixels along an edge of a patch."""
    channels: int

    def __post_init__(self) -> None:
        if self.patch < 1 or self.side % self.patch:
            raise OptionError(f"patch = {self.patch} does not divide side = {self.side}; use a divisor of the image's side")
        width = self.patch * self.patch * self.channels
        if self.codes.ndim != 2 or self.codes.shape[1] != width:
            shape = list(self.codes.shape)
            raise ModelError(f"the codebook has shape {shape}, and patches have {width} numbers; make it again")

    @property
    def num_codes(self) -> int:
        return len(self.codes)

    @property
    def grid(self) -> int:
        """Patches along an edge of an image."""
        return self.side // self.patch

    @property
    def num_tokens(self) -> int:
        """Codes of one image."""
        return self.grid**2

    def encode(self, images: Tensor) -> Tensor:
        """[N, T] codes of images [N, side, side, channels] in 0 .. 1, in raster order."""
        return nearest_codes(self.patches(images).flatten(0, 1), self.codes).view(len(images), self.num_tokens)

    def decode(self, tokens: Tensor) -> Tensor:
        """[N, side, side, channels] images of codes [N, T]."""
        cells = self.codes[tokens].view(len(tokens), self.grid, self.grid, self.patch, self.patch, self.channels)
        return cells.permute(0, 1, 3, 2, 4, 5).reshape(len(tokens), self.side, self.side, self.channels)

    def patches(self, images: Tensor) -> Tensor:
        """[N, T, patch * patch * channels] the patches of images, in raster order."""
        cells = images.view(len(images), self.grid, self.patch, self.grid, self.patch, self.channels)
        return cells.permute(0, 1, 3, 2, 4, 5).reshape(len(images), self.num_tokens, -1)

    def embeddings(self, vocab_size: int) -> Tensor:
        """[vocab_size, D] a vector per token: its patch. Tokens that are not codes lie far from all others."""
        far = 1e3 * torch.arange(1, vocab_size - self.num_codes + 1, dtype=self.codes.dtype)
        return torch.cat([self.codes, far[:, None].expand(-1, self.codes.shape[1])])

    def save(self, folder: Path) -> None:
        numbers = torch.tensor([self.side, self.patch, self.channels])
        save_file({"codes": self.codes.contiguous(), "shape": numbers}, folder / FILE)

    @staticmethod
    def load(folder: Path) -> Codebook:
        """The codebook in a model folder."""
        path = folder / FILE
        if not path.is_file():
            raise ModelError(f"{folder} has no {FILE}, so it is no image model; make one: python recipes/images.py --help")
        try:
            tensors = load_file(path)
            side, patch, channels = tensors["shape"].tolist()
        except (SafetensorError, KeyError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}); make the model again: python recipes/images.py") from error
        return Codebook(tensors["codes"], side, patch, channels)


def nearest_codes(patches: Tensor, codes: Tensor) -> Tensor:
    """[M] the nearest code of each patch [M, D]."""
    half_norms = codes.square().sum(-1) / 2
    return torch.cat([(half_norms - part @ codes.T).argmin(-1) for part in patches.split(_ROWS)])


def fit_codebook(images: Tensor, num_codes: int, *, patch: int, rounds: int = 20, seed: int = 0) -> Codebook:
    """A codebook of the patches of square images [N, side, side, channels] in 0 .. 1. Equal patches count once."""
    side, channels = images.shape[1], images.shape[3]
    width = patch * patch * channels
    empty = Codebook(torch.zeros(1, width), side, patch, channels)
    patches = empty.patches(images).flatten(0, 1).unique(dim=0)
    if len(patches) < num_codes:
        raise OptionError(f"num_codes = {num_codes} is more than the {len(patches)} different patches; use fewer codes")
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))
    codes = patches[order[:num_codes]]
    for _ in range(rounds):
        codes = _means(patches, nearest_codes(patches, codes), codes)
    return Codebook(codes[codes.sum(-1).argsort()].contiguous(), side, patch, channels)


def _means(patches: Tensor, owners: Tensor, codes: Tensor) -> Tensor:
    """Each code moves to the mean of its patches. A code without patches stays."""
    sums = torch.zeros_like(codes).index_add_(0, owners, patches)
    counts = torch.bincount(owners, minlength=len(codes))[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), codes)
