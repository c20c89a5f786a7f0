"""Compiles the native pass once per machine and keeps it.

The sources need no headers but the compiler's. They are compiled once: the library is named after the sources, the compiler,
the processor and the instruction set (``OUTRIDER_ISA``), and kept in the user's cache folder (``OUTRIDER_CACHE`` moves it).
Without a compiler, the library inside the wheel is used (``prebuilt.py``). Without either, or with ``OUTRIDER_NATIVE=0``,
everything runs in PyTorch.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch

from outrider.models.native.compiler import FOLDER, compile_library, find_compiler, is_wanted, kept_path
from outrider.models.native.instruction_sets import isa_here
from outrider.models.native.prebuilt import prebuilt_library

_SOURCE = FOLDER / "decoder.cpp"
FLAGS = ("-O3", "-ffp-contract=fast", "--param=avoid-fma-max-bits=0", "-pthread", "-Wno-psabi")
"""Compiler flags. The last but two fuses products and sums everywhere, because the tuning of some processors would not, and
would give other bits."""


class Build:
    """The library, as soon as it is built. ``library`` never waits, ``wait`` does."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._is_done = False

    def start(self) -> None:
        """Open the library if it was built before; otherwise begin to build it in the background."""
        with self._lock:
            if self._is_done or self._thread is not None:
                return
            compiler = _compiler()
            if compiler is None:
                self._library, self._is_done = _open_prebuilt(), True
                return
            path = _path(compiler)
            if path.is_file():
                self._library, self._is_done = _open(path), True
                return
            self._thread = threading.Thread(target=self._build, args=(compiler, path), daemon=True)
            self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and not self._is_done

    @property
    def library(self) -> ctypes.CDLL | None:
        return self._library

    def wait(self) -> ctypes.CDLL | None:
        self.start()
        thread = self._thread
        if thread is not None:
            thread.join()
        return self._library

    def _build(self, compiler: str, path: Path) -> None:
        try:
            compile_library(compiler, _SOURCE, (*FLAGS, *isa_here().flags), path)
            self._library = _open(path)
        except (OSError, subprocess.SubprocessError) as error:
            warnings.warn(f"the native CPU pass could not be built ({_reason(error)}); running in PyTorch", stacklevel=2)
        self._is_done = True


BUILD = Build()


def built_library() -> ctypes.CDLL | None:
    """The library; None if it cannot be had. Waits for the first build on a machine, and says so. A process that started in
    PyTorch and switched later would write other texts from the same seed."""
    BUILD.start()
    if BUILD.is_running:
        began = time.perf_counter()
        print("building the native CPU pass, once on this machine (one to three minutes) ...", file=sys.stderr, flush=True)
        if BUILD.wait() is not None:
            print(f"built in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return BUILD.library


def ready_to_measure() -> None:
    """Wait for the first build before a measurement. Does nothing on a GPU."""
    if not torch.cuda.is_available():
        built_library()


def can_build() -> bool:
    """Whether the native pass is wanted and available, from a compiler or from the wheel."""
    return is_wanted() and (find_compiler() is not None or prebuilt_library() is not None)


def _compiler() -> str | None:
    """A C++ compiler, unless the user disabled native code."""
    if not is_wanted():
        return None
    found = find_compiler()
    if found is None and prebuilt_library() is None:
        warnings.warn(
            "no C++ compiler was found, so the CPU runs in PyTorch, which is slower for small models; install g++ "
            "(or set OUTRIDER_NATIVE=0 to silence this)",
            stacklevel=3,
        )
    return found


def _path(compiler: str) -> Path:
    """Path of the library for these sources, this compiler and this processor."""
    sources = (_SOURCE, *sorted(FOLDER.rglob("*.hpp")))
    return kept_path(compiler, "native", sources, (*FLAGS, *isa_here().flags))


def _open(path: Path) -> ctypes.CDLL | None:
    library = ctypes.CDLL(str(path))
    return library if library.outrider_init() else None


def _open_prebuilt() -> ctypes.CDLL | None:
    """The library in the wheel, if it is wanted and this system can load it."""
    path = prebuilt_library() if is_wanted() else None
    try:
        return None if path is None else _open(path)
    except OSError as error:
        warnings.warn(f"the native CPU pass of the wheel could not be loaded ({error}); running in PyTorch", stacklevel=3)
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return lines[0] if lines else f"the compiler exited with {error.returncode}"
    return str(error)
