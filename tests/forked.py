"""Companion processes as forks of the test process, so that PyTorch and the package are not imported again for each."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from outrider.models import companion

_MOST_FILES = 1 << 16


def can_fork() -> bool:
    """A fork cannot use a GPU that its parent has looked at, and on macOS not the system's libraries."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def fork_companions() -> None:
    """From now on a companion's module is run by a fork, where that is possible."""
    if can_fork():
        companion.subprocess = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def _start(command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """The system has set the fork's streams and session when it is asked what to do before it becomes ``command``."""
    return subprocess.Popen(command, preexec_fn=partial(_run, command[-1], env), **streams)  # noqa: PLW1509 (it never execs)


def _run(module: str, env: Mapping[str, str]) -> NoReturn:
    """The fork runs the module itself. It never comes back to the test that it was forked in, and collects nothing of it."""
    os.closerange(3, _MOST_FILES)  # the other companions end when their pipes are closed
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    code = 0
    try:
        import_module(module).main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)
