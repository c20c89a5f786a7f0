"""Kernels that follow one another closely: each lets the next be launched before it has ended, and waits before it reads.

Programmatic dependent launch (Hopper and later) hides the launch of a kernel behind the end of the one in front. A kernel calls
``begin`` before it reads what an earlier kernel wrote, and ``end`` when its own reading is done; without the feature both
are nothing. Off by default: see docs/log.md for what it measured.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os

import triton
import triton.language as tl

EARLY = os.environ.get("OUTRIDER_EARLY_LAUNCH", "0") == "1"
"""Whether kernels are launched this way; fixed when the process starts, since kernels are compiled for it."""


@triton.jit
def begin(EARLY: tl.constexpr):  # noqa: N803
    """Wait for the kernel in front."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def end(EARLY: tl.constexpr):  # noqa: N803
    """Let the next kernel be launched."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
