"""Where a model comes from: a folder, a GGUF file, or a name on the hub, which is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ModelError, OptionError


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    name: str
    """A folder, a hub name or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    trust_remote_code: bool = False
    """Whether a checkpoint may run Python code that it brings along."""


def local_path(source: str | Source) -> Path:
    """A local folder or GGUF file. A hub name is downloaded, or found in the cache without a network."""
    name, revision = (source, None) if isinstance(source, str) else (source.name, source.revision)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise OptionError(
            f"revision = {revision!r} applies only to a model on the hub, and {name} is on this machine; leave it out"
        )
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such file; give the path of a .gguf file, a model folder or a hub name")
        return path
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is a file, but not a .gguf one; give a model folder, a .gguf file or a hub name")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"{name}: no such folder; give a model folder, a .gguf file or a hub name (owner/model)")
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r} on the hub; give a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name}: neither a folder here nor a model on the hub (or it is private); check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{name}: not on this machine, and the hub did not answer ({reason}); give a local folder") from error
