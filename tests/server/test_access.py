"""Who may come in: keys from a file, limits of each key, the audit log, request numbers, other sites, connections."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from inprocess import bystander, run  # noqa: E402
from serving import Served  # noqa: E402

from outrider.core.errors import OptionError  # noqa: E402
from outrider.server.connections import Door  # noqa: E402
from outrider.server.failures import ApiError  # noqa: E402
from outrider.server.keys import KeyRing, read_keys  # noqa: E402
from outrider.server.logs import JsonLines, Sparse  # noqa: E402
from outrider.server.quota import KeyUsage  # noqa: E402
from outrider.server.service import Service  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

_ASKED = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _write(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": list(keys)}))
    os.utime(path, ns=(time.time_ns(), time.time_ns() + len(path.read_text())))
    return path


def test_keys_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    path, clock = _write(tmp_path / "keys.json", {"name": "alice", "key": "old"}), _Clock()
    ring = KeyRing(["fixed"], path, clock=clock)
    alice = ring.find("old")
    assert alice is not None and alice.name == "alice" and ring.find("fixed") is not None and ring.find("new") is None
    digest = hashlib.sha256(b"new").hexdigest()
    _write(path, {"name": "alice", "key": "old"}, {"name": "alice", "sha256": digest})
    clock.now += 2
    assert ring.find("new") is alice and ring.find("old") is alice  # both during the change, and one account
    _write(path, {"name": "alice", "sha256": digest, "max_tokens": 7})
    clock.now += 2
    assert ring.find("old") is None
    found = ring.find("new")
    assert found is not None and found is alice and found.client.max_tokens == 7
    path.write_text("{")
    clock.now += 2
    assert ring.find("new") is alice  # a broken file changes nothing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"keys": []}', "keys"),
        ('{"keys": [{"name": "a"}]}', "exactly one of"),
        ('{"keys": [{"name": "a", "key": "b", "token_per_minute": 1}]}', "token_per_minute"),
    ],
)
def test_a_key_file_with_a_mistake_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=words):
        read_keys(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_keys(tmp_path / "none.json")


def test_a_key_has_its_requests_and_tokens_a_minute() -> None:
    clock = _Clock()
    account = KeyUsage("a", {"requests_per_minute": 2, "tokens_per_minute": 60, "max_concurrent": 2}, clock=clock)
    account.enter()
    account.enter()
    with pytest.raises(ApiError, match="2 requests running"):
        account.enter()
    account.leave(10)
    with pytest.raises(ApiError, match="2 requests a minute") as caught:
        account.enter()
    assert caught.value.status == 429 and caught.value.retry_s == pytest.approx(30)
    clock.now += 31
    account.enter()
    account.leave(200)
    clock.now += 31
    with pytest.raises(ApiError, match="60 tokens a minute"):  # it took more than it had, and has to wait for it
        account.enter()
    clock.now += 120
    account.enter()


def test_limits_of_a_key_hold_over_http(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    limited = {"name": "alice", "key": "secret", "requests_per_minute": 3, "max_tokens": 5}
    path = _write(tmp_path / "keys.json", limited, {"name": "bob", "key": "other"})

    async def work(service: Service, client: Any) -> None:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("secret", "other"))
        assert (await client.post("/v1/completions", json=_ASKED)).status_code == 401
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401
        asked = {**_ASKED, "max_tokens": 6}
        refused = await client.post("/v1/completions", json=asked, headers=alice)
        assert refused.status_code == 400 and "at most 5" in refused.json()["error"]["message"]
        marked = {**alice, "X-Request-Id": "mine-1"}
        codes = [(await client.post("/v1/completions", json=_ASKED, headers=marked)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        late = await client.post("/v1/completions", json=_ASKED, headers=alice)
        assert late.json()["error"]["code"] == "rate_limit_exceeded" and int(late.headers["retry-after"]) >= 1
        assert (await client.post("/v1/completions", json=asked, headers=bob)).status_code == 200
        assert (await client.get("/v1/models", headers=alice)).status_code == 200  # looking costs nothing

    run(work, api_key_file=str(path), audit_log=str(audit))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    told = [line for line in lines if line["id"] == "mine-1" and line["status"] == 200]
    assert len(told) == 2 and told[0]["key"] == "alice" and told[0]["completion_tokens"] == 2 and "time" in told[0]
    assert {"alice", "bob"} <= {line["key"] for line in lines}
    assert "Once" not in audit.read_text() and "secret" not in audit.read_text()


def test_an_audit_log_that_cannot_be_written_is_said_at_once_and_stops_nobody(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be written"):
        run(None, audit_log=str(tmp_path))  # type: ignore[arg-type]

    async def work(service: Service, client: Any) -> None:
        (tmp_path / "log" / "audit").unlink()
        (tmp_path / "log").rmdir()  # as good as a disk that is gone
        assert await bystander(client)
        service.audit.close()
        assert service.audit.num_lost == 1

    (tmp_path / "log").mkdir()
    run(work, audit_log=str(tmp_path / "log" / "audit"))


def test_request_numbers_are_kept_and_health_checks_are_not_counted() -> None:
    async def work(service: Service, client: Any) -> None:
        for given, kept in (("abc-1.2:x", True), ("a b", False), ("x" * 200, False)):
            answer = await client.get("/v1/models", headers={"X-Request-Id": given})
            assert (answer.headers["x-request-id"] == given) is kept
        for path in ("/health", "/ping", "/version", "/load"):
            assert (await client.get(path)).status_code == 200, path
        text = (await client.get("/metrics")).text
        counted = [line for line in text.splitlines() if line.startswith("outrider:requests_total")]
        assert sum(float(line.split()[-1]) for line in counted) == 3

    run(work)


def test_other_sites_are_let_in_by_name() -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}

    async def work(service: Service, client: Any) -> None:
        allowed = await client.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.options("/v1/completions", headers={**asked, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers

    run(work, cors_origins=("https://app.example",))


def test_the_door_counts_connections() -> None:
    door = Door(max_total=3, max_each=2, header_s=1.0)
    assert door.enter("a") is None and door.enter("a") is None
    refused = door.enter("a")
    assert refused is not None and refused.status == 429
    door.leave("a")
    assert door.enter("b") is None
    full = door.enter("c")
    assert full is not None and full.status == 503
    for client in "aabc":
        door.leave(client)
    assert not door.held


def _told(connection: socket.socket, *words: bytes) -> bool:
    """Whether the server says all of the words before it closes."""
    heard = b""
    while not all(word in heard for word in words):
        part = connection.recv(4096)
        if not part:
            return False
        heard += part
    return True


@pytest.mark.slow()
def test_slow_headers_and_too_many_connections_are_ended() -> None:
    with Served("--header-timeout", "2", "--max-client-connections", "20") as server:
        host, port = server.address.removeprefix("http://").split(":")

        def connect() -> socket.socket:
            return socket.create_connection((host, int(port)), timeout=30)

        slow, kept = connect(), connect()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _told(kept, b"200 OK", b'"requests":0}')
        kept.sendall(b"GET /hea")  # a further request on the same connection may not be slow either
        assert _told(slow, b"408", b"headers did not come") and _told(kept, b"408", b"headers did not come")
        many = [connect() for _ in range(25)]
        assert _told(many[-1], b"429", b"too_many_connections")
        for connection in (slow, kept, *many):
            connection.close()
        _until_well(server)
        _without_descriptors(server, [connect for _ in range(15)])
        _until_well(server)
    assert all(line.startswith(("{", "outrider:")) for line in server.log), server.log


def _until_well(server: Served) -> None:
    """Waits until the server saw that connections were closed and answers a new one."""
    end = time.monotonic() + 60
    while not _is_well(server):
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_well(server: Served) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _without_descriptors(server: Served, connects: Sequence[Callable[[], socket.socket]]) -> None:
    """Connections beyond what the process may open: a few lines are written, not thousands."""
    resource, pid, files = pytest.importorskip("resource"), server.process.pid, Path(f"/proc/{server.process.pid}/fd")
    if not hasattr(resource, "prlimit") or not files.exists():
        return
    limits, num_lines = resource.prlimit(pid, resource.RLIMIT_NOFILE), len(server.log)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(list(files.iterdir())) + 4, limits[1]))
    waiting = [connect() for connect in connects]
    while not any("descriptor" in line or "open files" in line for line in server.log[num_lines:]):
        assert server.process.poll() is None
        time.sleep(0.05)
    time.sleep(1.5)  # asyncio listens again a second after it had no descriptor, and would say it again
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for connection in waiting:
        connection.close()
    assert len(server.log) - num_lines < 20


def test_a_line_that_repeats_is_counted_instead() -> None:
    clock, lines = _Clock(), list[str]()
    logger, handler = logging.getLogger("outrider.test_logs"), logging.Handler()
    handler.addFilter(Sparse(clock))
    handler.emit = lambda record: lines.append(JsonLines().format(record))  # type: ignore[method-assign]
    logger.handlers, logger.propagate = [handler], False
    for round_number in range(2):
        for _ in range(1000):
            logger.error("no files left")
        clock.now += 11 * (round_number + 1)
    assert len(lines) == 10 and all(json.loads(line)["event"] == "no files left" for line in lines)
    assert json.loads(lines[5])["skipped"] == 995


def test_half_of_tls_is_refused() -> None:
    with pytest.raises(OptionError, match="both --tls-cert and --tls-key"):
        ServerSettings(tls_cert="cert.pem")
