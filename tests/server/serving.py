"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import httpx


class Served:
    """``outrider serve`` on a free port; ``log`` is what it wrote."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "outrider", "serve", "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        assert self.process.stdout is not None
        self.log: list[str] = []
        for line in self.process.stdout:
            self.log.append(line)
            found = re.search(r"at (http://\S+:\d+)/", line)
            if found:
                self.address = found[1]
                break
        else:
            raise AssertionError("the server did not start: " + "".join(self.log))
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60, **options)

    def whole_log(self) -> list[str]:
        """What it wrote until it ended."""
        self._reader.join(60)
        return self.log

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
