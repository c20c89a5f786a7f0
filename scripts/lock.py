"""The versions that development runs with: ``make lock`` writes ``requirements-dev.lock`` from the environment that is set up.

It follows the package's own dependencies and those of the extras below, as far as they are installed, and pins each of them.
Pins of packages that are not installed stay as they are, so an environment without Ray keeps Ray's. ``--check`` says which
installed version differs from the file, and fails if one does. To install the same versions:
``pip install -e ".[dev,serve]" -c requirements-dev.lock``. The container images are made with them too. The file is a list of
constraints without hashes or addresses, so it serves every platform and every mirror.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-dev.lock"
EXTRAS = ("dev", "serve", "otel", "ray", "vlm")
_HEADER = f"# Written by `make lock` (scripts/lock.py): what outrider[{','.join(EXTRAS)}] ran with.\n"


def named(text: str) -> str:
    """A package's name in its one normal form."""
    return re.sub(r"[-_.]+", "-", text).lower()


def wanted() -> list[Requirement]:
    """What the project asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (need for extra in EXTRAS for need in project["optional-dependencies"][extra])
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


def below(requirement: Requirement) -> Iterable[Requirement]:
    """What an installed package asks for itself, with the extras that were asked of it."""
    for text in metadata.requires(requirement.name) or ():
        need = Requirement(text)
        extras = [*requirement.extras, ""]
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            yield need


def closure(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Version by name of all packages that are reached; those that are not installed are left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        need = waiting.pop()
        key = named(need.name), frozenset(need.extras)
        if key in seen or key[0] == "outrider":  # an extra may name another one of the project
            continue
        seen.add(key)
        try:
            found[key[0]] = Version(metadata.version(need.name)).public
        except metadata.PackageNotFoundError:
            continue
        waiting += below(need)
    return found


def read_lock(text: str) -> dict[str, str]:
    """Version by name in a lock file."""
    pairs = (line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return dict(pairs)


def absent(locked: dict[str, str]) -> dict[str, str]:
    """The pins of packages that are not installed here."""
    installed = {named(one.metadata["Name"]) for one in metadata.distributions()}
    return {name: version for name, version in locked.items() if name not in installed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    here, locked = closure(wanted()), read_lock(LOCK.read_text())
    if not parser.parse_args().check:
        pins = sorted({**absent(locked), **here}.items())
        LOCK.write_text(_HEADER + "".join(f"{name}=={version}\n" for name, version in pins))
        print(f"{LOCK.name}: {len(pins)} packages, {len(here)} of them from this environment")
        return 0
    other = {name: version for name, version in locked.items() if here.get(name, version) != version}
    wrong = [f"{name}: {here[name]} is installed, {version} is locked" for name, version in other.items()]
    wrong += [f"{name}: installed and not locked; run make lock" for name in sorted(set(here) - set(locked))]
    print("\n".join(wrong) or f"{len(locked)} packages are as locked")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
