"""Programs in fresh processes: forks of one process that has imported PyTorch and nothing of ours. It starts once a worker."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_PARENT = """
import json, os, sys, tempfile, traceback
import torch

def become(asked):
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    for number, path in enumerate((os.devnull, asked["out"], asked["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    code = 0
    try:
        exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        become(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _parent() -> subprocess.Popen[str]:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(parent.kill)
    return parent


def run_fresh(program: str, *, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What a new process makes of a program: its exit code and what it printed. ``env`` is the whole environment."""
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"program": program, "env": dict(os.environ if env is None else env), "out": str(out), "err": str(err)}
        parent.stdin.write(json.dumps(asked) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess([program], code, out.read_text(), err.read_text())
