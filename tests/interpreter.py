"""Triton kernels without a GPU: they are interpreted, from the first one that any test imports."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch


def can_interpret() -> bool:
    """Whether there are kernels, and no device to compile them for."""
    return importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


def interpret_kernels() -> None:
    """Kernels defined from now on are interpreted, and all must be: an interpreted one cannot call a compiled one.
    One-element arrays become numbers as they did before numpy 2.4. Conversions to FP8 are PyTorch's, because the interpreter
    forgets to carry into the exponent. The language is changed for the interpreter once and stays
    so: to change it for every call of a function takes most of a kernel's time."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
    interpreter._convert_float = _to_fp8(interpreter._convert_float)
    change = functools.cache(lambda: _change(interpreter))
    interpreter._patch_lang = lambda _: change() or _Stays()


def _to_fp8(convert: Callable[..., Any]) -> Callable[..., Any]:
    def converted(numbers: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
        if (source.name, to.name) != ("fp32", "fp8e4nv"):
            return convert(numbers, source, to, rounding_mode)
        return torch.from_numpy(numbers.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted


class _Stays:
    """A change of the language that is not taken back."""

    def restore(self) -> None: ...


def _change(interpreter: Any) -> None:
    """Let the language of kernels mean what the interpreter does."""
    import triton.language as tl

    scope, builder = interpreter._LangPatchScope(), interpreter.interpreter_builder
    for part in (tl, tl.core):
        interpreter._patch_builtin(part, builder, scope)
        interpreter._patch_lang_core(part, scope)
    for part in (tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(part, builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
