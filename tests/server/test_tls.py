"""TLS of the server's own: a client that trusts the certificate is answered, one that speaks plain HTTP is not."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from outrider.server import run  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate with")


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for answer in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{answer}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def _certificate(folder: Path) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key


def test_answers_come_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = _certificate(tmp_path)
    heard = list[Any]()
    monkeypatch.setattr(run, "settle", lambda: None)

    def ask(port: int) -> None:
        trust = ssl.create_default_context(cafile=cert)
        heard.append(httpx.get(f"https://localhost:{port}/", verify=trust, trust_env=False, timeout=60).text)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            heard.append(plain.recv(100))

    async def asked(port: int, server: Any) -> None:
        await asyncio.to_thread(ask, port)
        server.should_exit = True

    servers, tasks = list[Any](), list[Any]()
    monkeypatch.setattr(run, "_Server", lambda config, made=run._Server: servers.append(made(config)) or servers[0])
    listener = run.bind("127.0.0.1", 0)
    run.serve_app(
        _app, ServerSettings(tls_cert=cert, tls_key=key), listener, signals=run.Signals(lambda: None, None),
        on_ready=lambda port: tasks.append(asyncio.ensure_future(asked(port, servers[0]))),
    )  # fmt: skip
    assert heard[0] == "https" and not heard[1].startswith(b"HTTP/1.1 200")
