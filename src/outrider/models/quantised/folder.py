"""A folder of safetensors whose matrices are quantised, read as if they were not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.quantised.format import Format
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.matrix import Quantised
from outrider.models.weights import SafetensorsFolder, TensorSource


def checkpoint(folder: Path, raw: Mapping[str, Any]) -> SafetensorsFolder | QuantisedFolder:
    """The tensors of a model folder whose config.json is ``raw``, dequantised where they are quantised."""
    form, tensors = format_of(raw), SafetensorsFolder(folder)
    return tensors if form is None else QuantisedFolder(tensors, form)


@final
class QuantisedFolder(TensorSource):
    """The tensors of a checkpoint under the names of an unquantised one; a matrix is dequantised when it is read."""

    def __init__(self, tensors: SafetensorsFolder, form: Format) -> None:
        self.origin, self.form, self._tensors = tensors.origin, form, tensors
        marker, endings = form.names.marker, (form.names.marker, *form.names.others)
        stems = {name.removesuffix(marker) for name in tensors.names if name.endswith(marker)}
        self._stems = {stem + form.names.whole: stem for stem in stems}
        parts = {stem + ending for stem in stems for ending in endings}
        self._names = (tensors.names - parts) | frozenset(self._stems)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    @property
    def quantised_names(self) -> frozenset[str]:
        """Names of the matrices that are quantised."""
        return frozenset(self._stems)

    @property
    def num_parameters(self) -> int:
        """Numbers of the model, as an unquantised checkpoint would have them."""
        ending, per_number = self.form.codes
        plain = sum(self._tensors.size(name) for name in self._names - self.quantised_names)
        return plain + sum(self._tensors.size(stem + ending) * per_number for stem in self._stems.values())

    def read(self, name: str) -> Tensor:
        if name not in self._stems:
            return self._tensors.read(name)
        try:
            return self.form.dequantised(self._parts(name))
        except (KeyError, ValueError, IndexError, RuntimeError, TypeError) as error:
            raise self._broken(name, error) from error

    def matrix(self, name: str) -> Quantised | None:
        """A quantised matrix as codes and scales; None where its format has none that can be multiplied."""
        try:
            return self.form.matrix(self._parts(name))
        except (KeyError, ValueError, IndexError, RuntimeError, TypeError) as error:
            raise self._broken(name, error) from error

    def _parts(self, name: str) -> dict[str, Tensor]:
        stem, endings = self._stems[name], (self.form.names.marker, *self.form.names.others)
        return {ending: self._tensors.read(stem + ending) for ending in endings if stem + ending in self._tensors.names}

    def _broken(self, name: str, error: Exception) -> ModelError:
        what = f"{self.origin}: the tensors of {name!r} do not fit together as {self.form.title}"
        return ModelError(f"{what} ({type(error).__name__}: {error}); weights and config.json differ: fetch both again")
