"""Any Hugging Face causal language model as a target, through its own modules.

A tree is passed as a 4-D mask (one per kind of layer if the architecture has several) and a position per node. No model
declares that it honours both, so it is *tried* when the model is first opened (``hf_check.py``), and the verdict is kept
(``hf_verdict.py``). A model that fails, or keeps a recurrent state instead of keys and values, is refused.
(``models/recurrent/`` has decoders for some of the latter.)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Cache
from outrider.core.resume import Resume
from outrider.core.scores import Scores
from outrider.core.traits import TargetTraits
from outrider.core.tree import TokenTree
from outrider.models.attention.padded import padded_bias
from outrider.models.hf_cache import HFCache
from outrider.models.hf_check import AdaptedModel, check_model
from outrider.models.hf_verdict import TextPromise, kept_verdict
from outrider.models.prefill import read_in_chunks
from outrider.models.quantised.formats import method_of, unknown_method

_CHUNK = 512
_FULL, _SLIDING = "full_attention", "sliding_attention"


def check_quantisation(raw: Mapping[str, Any]) -> None:
    """Refuse a checkpoint in a format that transformers does not know, because it would load random weights."""
    unknown = unknown_method(raw)
    if unknown is not None and method_of(raw) not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(f"{unknown}; use a checkpoint in one of these")


@final
class HFModel(AdaptedModel):
    """A transformers model behind our interface."""

    def __init__(self, model: Any, name: str = "model", *, max_len: int | None = None, is_stored: bool = False) -> None:
        """``model`` is any transformers causal language model; ``name`` is for messages; ``max_len`` shortens its
        context. ``is_stored`` says that it is unchanged since it was read, so that an earlier verdict holds."""
        self.model = model.eval().requires_grad_(False)
        self.name = name
        config = _text_config(model, name)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_layers = int(config.num_hidden_layers)
        self.max_len = _context_of(config, name, max_len)
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size = int(config.hidden_size)
        self._windows = _windows_of(config, name)
        self._arguments = set(inspect.signature(model.forward).parameters)
        self._counts_types = any(key.endswith("token_type_ids") for key, _ in model.named_buffers())
        owner, self._last_layer = _last_layer(model, self.num_layers, name)
        judge = partial(check_model, self, model)
        self._obey(kept_verdict(model, self.max_len, judge) if is_stored else judge(), wanted=max_len)
        self._readout = self._find_readout(owner, getattr(config, "final_logit_softcapping", None))
        self.traits = TargetTraits(can_read_out=self._readout is not None)

    @staticmethod
    def load(
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> HFModel:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers raises many kinds, and all of them mean that the folder cannot be used
            reason = " ".join(str(error).split())
            if not trust_remote_code and "trust_remote_code" in reason:
                what = "brings Python code of its own, which is not run by default"
                raise ModelError(f"{folder} {what}; read it, then use trust_remote_code=True (--trust-remote-code)") from error
            why = f"{type(error).__name__}: {reason[:200]}"
            raise ModelError(f"{folder}: transformers cannot open it ({why}); fetch it again, or use another model") from error
        return HFModel(model.to(device), str(folder), max_len=max_len, is_stored=True)

    def _obey(self, verdict: TextPromise, *, wanted: int | None) -> None:
        """Refuse the model, or shorten its context with a warning. A context that was asked for is not shortened."""
        if verdict.refused is not None:
            raise ModelError(f"{self.name}: {verdict.refused}")
        if verdict.capped is not None:
            what = f"{self.name}: {verdict.capped}"
            if wanted is not None:
                raise ModelError(f"{what}; use max_len = {verdict.max_len} or less")
            warnings.warn(f"{what}; it is opened for {verdict.max_len} tokens", stacklevel=4)
        self.max_len = verdict.max_len

    def new_cache(self, batch_size: int) -> HFCache:
        return HFCache([0] * batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        def run(tree: TokenTree) -> Mapping[int, Tensor]:
            return self._forward(tree, cache, taps, num_logits=1).taps

        empty = torch.zeros(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return read_in_chunks(rows, cache, run, chunk_len=_CHUNK, taps=taps, empty=empty)

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert resume is None, "only a LayeredTarget can go on from earlier layers"
        return self._forward(tree, cache, taps, start=start)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._readout is None:
            raise ModelError(f"{self.name}: the head of {self._kind} cannot be used apart; choose a method without early exits")
        with torch.no_grad():
            return self._readout(hidden)

    def _forward(self, tree: TokenTree, cache: Cache, taps: Sequence[int], *, start: int = 0, num_logits: int = 0) -> Scores:
        """One pass. ``num_logits`` limits the logits to the last nodes, if the model supports that."""
        assert isinstance(cache, HFCache), "an HFModel works on the caches it made"
        cache.reserve(tree.num_nodes, start=start)
        starts = torch.tensor(cache.lengths, device=self.device)[:, None]
        options: dict[str, Any] = {"logits_to_keep": num_logits} if "logits_to_keep" in self._arguments else {}
        if self._counts_types:  # its own row of them is as long as the context, and a tree may have more nodes
            options["token_type_ids"] = torch.zeros_like(tree.tokens[:, start:])
        with torch.no_grad(), _Tap(self._last_layer if self.num_layers in taps else None) as last:
            output = self.model(
                input_ids=tree.tokens[:, start:],
                attention_mask=self._mask(tree, cache.lengths, start),
                position_ids=(starts + tree.depths)[:, start:].clamp(max=self.max_len - 1),  # padding of a full row
                past_key_values=cache.storage,
                use_cache=True,
                output_hidden_states=bool(taps),
                **options,
            )
        tapped = {tap: output.hidden_states[tap] for tap in taps if tap < self.num_layers}
        return Scores(output.logits, tapped if last.state is None else {**tapped, self.num_layers: last.state})

    def _mask(self, tree: TokenTree, lengths: Sequence[int], start: int) -> Tensor | dict[str, Tensor] | None:
        if tree.is_chain and min(lengths) == max(lengths) and self._windows == {_FULL: None}:
            return None  # plain decoding: the model makes its own causal mask, or needs none
        masks = {
            kind: padded_bias(tree, lengths, window=size, dtype=self.dtype, start=start) for kind, size in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def masks_of(self, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """One mask for every kind of layer, as the model takes it."""
        return dict.fromkeys(self._windows, mask) if len(self._windows) > 1 else mask

    @torch.no_grad()
    def _find_readout(self, owner: nn.Module, softcap: float | None) -> LanguageModelHead | None:
        """The steps after the model's last layer, if they are modules in a row, the head, a factor and at most a soft cap."""
        called: list[nn.Module] = []
        handles = [
            child.register_forward_hook(lambda module, *_: called.append(module))
            for child in (*owner.children(), self._last_layer)
        ]
        tree = TokenTree.chain(torch.tensor([[1, 2, 3]], device=self.device))
        scores = self.score(tree, self.new_cache(1), taps=(self.num_layers,))
        for handle in handles:
            handle.remove()
        after = called[called.index(self._last_layer) + 1 :]
        state, head = scores.taps[self.num_layers], self.model.get_output_embeddings()
        try:
            bare = LanguageModelHead(after, head, None, 1.0)(state).float()
            scale = 1.0 if softcap else float((scores.logits.float() * bare).sum() / (bare * bare).sum())
            readout = LanguageModelHead(after, head, softcap, scale)
            same = torch.allclose(readout(state), scores.logits, rtol=1e-3, atol=1e-3)
        except RuntimeError:  # what follows the last layer is more than modules in a row
            return None
        return readout if same else None

    @property
    def _kind(self) -> str:
        return type(self.model).__name__


@final
class LanguageModelHead:
    """Computes logits from the last layer's output: modules, the head, a constant factor and a soft cap."""

    def __init__(self, modules: Sequence[nn.Module], head: nn.Module, softcap: float | None, scale: float) -> None:
        self._modules, self._head, self._softcap, self._scale = modules, head, softcap, scale

    def __call__(self, hidden: Tensor) -> Tensor:
        for module in self._modules:
            hidden = module(hidden)
        logits = self._head(hidden) * self._scale if self._scale != 1 else self._head(hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class _Tap:
    """Catches the output of the last layer, which ``hidden_states`` holds only after the final norm."""

    def __init__(self, layer: nn.Module | None) -> None:
        self.state: Tensor | None = None
        self._handle = None if layer is None else layer.register_forward_hook(self._catch)

    def _catch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        self.state = output[0] if isinstance(output, tuple) else output

    def __enter__(self) -> _Tap:
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def _text_config(model: Any, name: str) -> Any:
    """The text model's config; refused if several parts could be it."""
    try:
        return model.config.get_text_config()
    except ValueError as error:
        raise ModelError(f"{name}: {type(model).__name__} has several parts that read text; open its decoder alone") from error


def _context_of(config: Any, name: str, wanted: int | None) -> int:
    """Longest context: as the config declares, but less if positions are scaled by the length of a pass.

    longrope and dynamic scaling change all positions once a context exceeds the original one. A text would then depend on
    its neighbours, and cached keys on when they were written. Below that length nothing changes.
    """
    named = [getattr(config, key, None) for key in ("max_position_embeddings", "max_target_positions")]
    declared = int(next(filter(None, named), 1 << 20))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if (kind.get("rope_type") or kind.get("type")) in ("longrope", "dynamic", "su"):
            original = kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            declared = min(declared, int(original or declared))
    if wanted is not None and wanted > declared:
        raise OptionError(
            f"max_len = {wanted} is more than the {declared} tokens that {name} can be opened for; use at most that"
        )
    return wanted or declared


def _windows_of(config: Any, name: str) -> dict[str, int | None]:
    """Window size of each kind of layer; one kind where all layers are alike."""
    size = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        size = None
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {_FULL, _SLIDING}
    if unknown:
        raise ModelError(f"{name}: layers of kind {', '.join(sorted(unknown))} cannot score trees; use another model")
    if not kinds:
        return {_SLIDING if size else _FULL: size}
    return {kind: size if kind == _SLIDING else None for kind in sorted(kinds)}


@torch.no_grad()
def _last_layer(model: nn.Module, num_layers: int, name: str) -> tuple[nn.Module, nn.Module]:
    """The last decoder layer, and the module that owns the list of layers. Several lists may have the config's length;
    the one that reads text is taken, since models of images or sounds have encoders too."""
    lists = [(module, child) for module in model.modules() for child in module.children() if isinstance(child, nn.ModuleList)]
    found = [(owner, layers[-1]) for owner, layers in lists if len(layers) == num_layers]
    called: list[nn.Module] = []
    handles = [layer.register_forward_hook(lambda module, *_: called.append(module)) for _, layer in found]
    try:
        if len(found) > 1:
            model(input_ids=torch.tensor([[1, 2, 3]], device=next(model.parameters()).device))
    except Exception as error:  # transformers raises many kinds, and all of them mean the same here
        raise ModelError(
            f"{name}: {type(model).__name__} has no text model of its own ({type(error).__name__}); use another"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    used = [pair for pair in found if len(found) == 1 or pair[1] in called]
    if not used:
        raise ModelError(
            f"{name}: {type(model).__name__} has no list of {num_layers} layers, so its hidden states cannot be read; "
            "use another model"
        )
    return used[0]
