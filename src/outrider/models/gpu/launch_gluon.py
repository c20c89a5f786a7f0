"""``launch.py`` for kernels in Gluon, a language that not every triton has: ask ``limits.py`` before importing this."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin(EARLY: gl.constexpr):  # noqa: N803
    """Wait for the previous kernel."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end(EARLY: gl.constexpr):  # noqa: N803
    """Let the next kernel be launched."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
