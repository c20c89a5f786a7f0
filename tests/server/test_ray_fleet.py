"""A small fleet on Ray Serve itself. It needs the extra ``ray``; what it rests on is tested without in ``test_fleet.py``."""

from __future__ import annotations

import importlib.util

import httpx
import pytest
from serving import Served

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'outrider[ray]')"
)


@pytest.mark.slow
def test_two_replicas_answer_alike_and_are_counted_apart() -> None:
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with Served("--replicas", "2", "--log-level", "error") as served, httpx.Client(base_url=served.address, timeout=60) as http:
        texts = {
            http.post("/v1/completions", json={**asked, "prompt": f"{number} days ago"}).json()["choices"][0]["text"]
            for number in (1, 1, 1)
        }
        assert len(texts) == 1
        assert http.get("/health").json()["replicas"] == 2
        page = http.get("/metrics").text
        counts = [line for line in page.splitlines() if line.startswith("outrider:generation_tokens_total{")]
        assert len(counts) == 2 and sum(float(line.split()[-1]) for line in counts) == 24
        assert sorted(float(line.split()[-1]) for line in counts) == [0, 24], "one beginning, one replica"
    assert served.process.returncode == 0
