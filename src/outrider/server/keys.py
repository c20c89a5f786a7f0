"""API keys: from the command line or from a file that is read again when it changes, each with limits of its own.

    {"keys": [{"name": "alice", "key": "...", "requests_per_minute": 60, "tokens_per_minute": 20000,
               "max_concurrent": 4, "max_tokens": 512},
              {"name": "bob", "sha256": "..."}]}

A key can be given as the SHA-256 of itself, so that the file holds no secret. To rotate a key, add the new one under the same
name, and remove the old one when nobody uses it; both count against the same limits. If the file cannot be read, the earlier
keys stay valid.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.core.errors import OptionError
from outrider.server.quota import KeyUsage

_LOG = logging.getLogger("outrider.server")
_LOOK_S = 1.0
"""Least seconds between two checks of the file."""
_LIMITS = {"requests_per_minute", "tokens_per_minute", "max_concurrent", "max_tokens"}
Most = Annotated[int, Field(ge=1)]


class Key(BaseModel):
    """One key."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(min_length=1, max_length=64)]
    key: str | None = Field(None, min_length=1, repr=False)
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    requests_per_minute: Most | None = None
    tokens_per_minute: Most | None = None
    max_concurrent: Most | None = None
    max_tokens: Most | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> Key:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"key {self.name!r} needs exactly one of 'key' and 'sha256'")
        return self

    @property
    def digest(self) -> str:
        return self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    keys: Annotated[list[Key], Field(min_length=1)]


def read_keys(path: Path) -> list[Key]:
    try:
        return _File.model_validate(json.loads(path.read_text(encoding="utf-8"))).keys
    except OSError as error:
        raise OptionError(f"the key file {path} cannot be read ({error.strerror}); correct --api-key-file") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"the key file {path} is not valid: {where}: {first['msg']}; correct it") from None
    except ValueError as error:
        raise OptionError(f"the key file {path} is not valid JSON ({error}); correct it") from None


@final
class KeyRing:
    """The keys that open the server."""

    def __init__(
        self, plain: Sequence[str] = (), path: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``plain`` are keys of the command line, without limits."""
        self._plain = [Key(name=f"key-{number}", key=text, sha256=None) for number, text in enumerate(plain, 1)]
        self._path, self._clock = path, clock
        self._stamp: tuple[int, int, int] | None = _stamp(path) if path else None
        self._keys = [*self._plain, *(read_keys(path) if path else ())]
        self._looked = clock()
        self._accounts: dict[str, KeyUsage] = {}

    @property
    def is_asked_for(self) -> bool:
        return bool(self._keys)

    def find(self, given: str) -> KeyUsage | None:
        """The account of a key. Takes the same time for every wrong key."""
        self._look()
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return self._account(matches[0]) if matches else None

    def _account(self, key: Key) -> KeyUsage:
        limits = key.model_dump(include=_LIMITS)
        account = self._accounts.setdefault(key.name, KeyUsage(key.name, limits, clock=self._clock))
        if account.limits != limits:
            account.set_limits(limits)
        return account

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = self._clock()
        if self._path is None or now - self._looked < _LOOK_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = [*self._plain, *read_keys(self._path)]
        except OptionError as error:
            _LOG.error("the keys of before go on: %s", error)
        else:
            _LOG.info("%d API keys were read from the changed key file", len(self._keys))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
