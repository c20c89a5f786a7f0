"""Weights are packed into memory of their own, and what they were read into goes back to the system."""

import subprocess
import sys

import pytest

from outrider.bundled import bundled_path
from outrider.models.native import can_build

PROGRAM = """
import sys, torch
from outrider.models.load import load_model

def own_bytes():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

torch.randn(64, 64) @ torch.randn(64, 64)
load_model(sys.argv[2], dtype="float32")
before = own_bytes()
model = load_model(sys.argv[1], dtype="float32")
print((own_bytes() - before) / model.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_opened_model_takes_little_more_than_its_packed_matrices():
    """Its embedding comes on top. The draft model is opened first, so that libraries and their buffers are there."""
    if not can_build():
        pytest.skip("the native pass cannot be built here")
    command = [sys.executable, "-c", PROGRAM, bundled_path("target"), bundled_path("draft")]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 1.0 <= ratio < 1.35
