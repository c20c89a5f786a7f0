"""Settings and limits of a server, each with the field of the API or the flag it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from outrider.core.errors import OptionError

if TYPE_CHECKING:
    from outrider.server.response_store import StoreLimits

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST_PORT = 65_535


@dataclass(frozen=True)
class ServerSettings:
    """Where to listen, and the limits of requests."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine by default."""
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Keys that open /v1. Empty: no key is required."""
    max_rows: int = 32
    """Most requests that share rounds."""
    max_requests: int = 256
    """Most requests in the server, waiting ones included. Further ones get status 429."""
    max_choices: int = 16
    """Most prompts times ``n`` of one request."""
    max_tokens: int = 4096
    """Most tokens a request may ask for."""
    default_tokens: int = 256
    """Default number of tokens of a chat answer."""
    max_body_bytes: int = 4_000_000
    max_body_values: int = 300_000
    """Most values of a body, counted by its commas. A key counts as eight more, because it takes so much longer to read."""
    max_image_pixels: int = 16_000_000
    """Largest image of a prompt, before the model's processor makes it smaller."""
    max_images: int = 8
    """Most images in one prompt."""
    timeout_s: float = 600.0
    """Longest a request may take."""
    drain_s: float = 60.0
    """Time for running requests to finish after SIGTERM."""
    prefill_tokens: int = 512
    """Prompt tokens read between two rounds."""
    memory_budget: int | None = None
    """Bytes for caches and logits. To stay within them, trees shrink and requests wait."""
    prefix_bytes: int = 256_000_000
    """Bytes for the prefix cache; 0 turns it off."""
    stored_responses: int = 10_000
    """Most responses of ``/v1/responses`` that are stored; 0 stores none."""
    stored_bytes: int = 128_000_000
    """Most bytes of stored responses."""
    stored_age_s: float = 86_400.0
    """Seconds after which a stored response is forgotten."""
    grouping: str = "ragged"
    """Which rows share a round (``engine/grouping.py``)."""

    api_key_file: str | None = None
    """File of keys with limits (``keys.py``); read again when it changes."""
    audit_log: str | None = None
    """File with a line for every request: who asked what and when, never the text."""
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may call the API from a browser; "*" for all."""
    tls_cert: str | None = None
    tls_key: str | None = None
    replica: str = "0"
    """Name of this server among several: a label of its metrics."""
    header_timeout_s: float = 10.0
    """Longest time for the headers of a request."""
    max_connections: int = 2048
    """Most connections of all clients; fewer if the process may not open so many files."""
    max_client_connections: int = 1024
    """Most connections of one address."""
    grammar_workers: int = 2
    """Grammars compiled at once. Each is first tried in a process of its own."""
    grammar_queue: int = 16
    """Most grammars of one client that wait to be compiled."""
    grammar_timeout_s: float = 3.0
    """Processor time for compiling a grammar. The wall-clock limit is four times that."""
    grammar_bytes: int = 512_000_000
    """Memory for compiling a grammar."""
    grammar_cache_bytes: int = 64_000_000
    """Bytes of compiled grammars that are cached."""
    grammar_idle_s: float = 30.0
    """Seconds without work after which a grammar process ends."""
    schema_bytes: int = 131_072
    """Largest schema, regular expression or grammar."""
    schema_depth: int = 64
    """Deepest nesting of a schema, regular expression or grammar."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("TLS needs both --tls-cert and --tls-key; give the other one too")
        if self.port > LAST_PORT:
            raise OptionError(f"port = {self.port} is not valid; use at most {LAST_PORT}, or 0 for any that is free")
        for item in fields(self):
            value = vars(self)[item.name]
            low = 0 if item.name in ("port", "prefix_bytes", "stored_responses") else 1e-9
            if isinstance(value, int | float) and value < low:
                raise OptionError(f"{item.name} = {value} is not valid; use a positive number")

    @property
    def store_limits(self) -> StoreLimits:
        """Bounds of stored responses."""
        from outrider.server.response_store import StoreLimits  # `--help` needs none of the server's packages

        return StoreLimits(self.stored_responses, self.stored_bytes, self.stored_age_s)

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK
