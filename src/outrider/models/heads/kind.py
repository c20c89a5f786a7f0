"""What a kind of heads is: its module, and how folders of it are described, read and written.

``config.json`` is the plain format that other engines read, plus one block of ours. A kind's file says which keys and tensor
names its format has, what public checkpoints call them, and what other engines need. Our tensor names are those of the plain
format, so most kinds rename nothing.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.head import Head
from outrider.models.heads.layer_numbers import default_taps

Module = TypeVar("Module", bound=Head)
Raw = Mapping[str, Any]
"""The contents of a ``config.json``."""
Exported = tuple[dict[str, Any], dict[str, Tensor]]
"""``config.json`` and tensors of a folder for another engine."""

_UNUSED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class GgufLayout:
    """The GGUF layout of a kind of heads for llama.cpp (``models/gguf/heads.py``)."""

    architecture: str
    keys: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Metadata keys beyond those of decoders, with functions of the heads."""
    pairs_adjacent: bool = False
    """Whether rotary pairs are adjacent."""
    num_taps: int = 0
    """Required number of target layers to read; 0 for any."""
    reads_top: bool = True
    """Whether it may read the output of the target's last layer."""
    has_mask: bool = False
    """Whether the tokenizer's keys name the mask token."""


class HeadKind(ABC, Generic[Module]):
    """One kind of heads."""

    name: ClassVar[str]
    """The kind's name, which is also the method's."""
    module: type[Module]
    architectures: ClassVar[tuple[str, ...]]
    """Architecture names in ``config.json``; ours is the first."""
    model_type: ClassVar[str]
    counted_by: ClassVar[str | None] = None
    """The key of ``config.json`` with the number of depths; None for a head that is applied repeatedly."""
    has_layer: ClassVar[bool] = False
    """Whether there is a decoder layer, a Llama's unless ``layer_type`` says otherwise."""
    layer_type: ClassVar[str] = "llama"
    num_taps: ClassVar[int] = 1
    """Number of target layers it reads."""
    reads_cache: ClassVar[bool] = False
    """Whether it reads the keys and values of the target's last layer instead of states."""
    is_stack: ClassVar[bool] = False
    """Whether decoder layers may be stacked."""
    training: ClassVar[Mapping[str, Any]] = {}
    """Defaults of ``outrider train``: shapes and settings."""
    spoken: ClassVar[tuple[str, ...]] = ("lm_head.", "lm_heads.")
    """Prefixes of the matrices that have a row for every token the heads can produce."""
    formats: ClassVar[tuple[str, ...]] = ()
    """Formats of other engines to which it can be exported."""
    gguf: ClassVar[GgufLayout | None] = None
    """Its GGUF file; None for kinds that llama.cpp does not run."""
    served_by: ClassVar[str] = "outrider"
    """Engines that read it, in words."""

    def default_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers it reads by default of a target with this many."""
        return (num_layers + 1,) if self.reads_cache else default_taps(self.num_taps, num_layers)

    # --- config.json ---------------------------------------------------------------------------------------------------

    def claims(self, raw: Raw) -> bool:
        """Whether a public ``config.json`` describes heads of this kind."""
        return any(name in self.architectures for name in raw.get("architectures") or ())

    def new_keys(self, raw: Raw) -> dict[str, Any]:
        """Keys of the kind's own format for the ``config.json`` of new heads."""
        counted = {self.counted_by: raw.get("num_heads", 4)} if self.counted_by else {}
        return {"model_type": self.model_type, "architectures": [self.architectures[0]], **counted}

    def read_keys(self, raw: Raw) -> Raw:
        """A ``config.json`` with other spellings of public folders translated to ours."""
        return raw

    def num_depths(self, raw: Raw) -> int | None:
        """Number of depths that the heads predict; None for any."""
        return int(raw[self.counted_by]) if self.counted_by else None

    def problems(self, raw: Raw) -> list[str]:
        """Unsupported settings of a ``config.json``, in words."""
        del raw
        return []

    # --- tensors -------------------------------------------------------------------------------------------------------

    def tensor_names(self, names: Iterable[str]) -> dict[str, str]:
        """A map from our names to the file's names, for every tensor that counts."""
        kept = (name for name in names if not name.endswith(_UNUSED))
        return {self.tensor_name(name.removeprefix("model.").removeprefix("speculator.")): name for name in kept}

    def tensor_name(self, name: str) -> str:
        """Our name of a tensor in a public checkpoint."""
        return name

    def spread(self, state: Mapping[str, Tensor], wanted: Iterable[str], config: HeadConfig) -> dict[str, Tensor]:
        """The tensors of a file, with shared tensors copied to all their places."""
        del wanted, config
        return dict(state)

    # --- other engines -------------------------------------------------------------------------------------------------

    def export(self, head: Module, form: str, state: dict[str, Tensor], *, target_name: str) -> Exported:
        """Heads in one of ``formats``. ``state`` holds their tensors as they are written."""
        del head, state, target_name
        raise OptionError(f"{self.name} heads have no format {form!r}; {nearest(form, self.formats)}")


def plain_keys(head: Head) -> dict[str, Any]:
    """The ``config.json`` of heads without our own block."""
    return {key: value for key, value in head.config.raw.items() if key != "outrider"}


def only(state: Mapping[str, Tensor], *beginnings: str) -> dict[str, Tensor]:
    """The tensors whose names have one of these prefixes."""
    return {name: tensor for name, tensor in state.items() if name.startswith(beginnings)}


def need_whole_vocabulary(config: HeadConfig) -> None:
    """Refuse to export heads with a reduced vocabulary, for formats that cannot express it."""
    if config.draft_vocab_size != config.vocab_size:
        raise OptionError(f"{config.kind} heads with a reduced vocabulary have no other format; train them with all tokens")


def first_of(raw: Raw, keys: Sequence[str]) -> Any:
    """The value of the first key that has one; None if none has."""
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
