"""What a wheel must hold beside Python files. A missing header shows only where the wheel is installed, not in a checkout."""

from __future__ import annotations

import os
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from outrider.core.version import UNINSTALLED, version_here

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_holds_every_source_of_the_native_pass() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["outrider"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    sources = {path for ending in ("cpp", "hpp") for path in PACKAGE.rglob(f"*.{ending}")}
    missing = sorted(str(path.relative_to(PACKAGE)) for path in sources - packed)
    assert sources and not missing, f"add a pattern for {missing} to [tool.setuptools.package-data]"


def test_the_extra_all_names_extras_that_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = [need.removeprefix("outrider[").removesuffix("]").split(",") for need in extras["all"]]
    assert {name for names in named for name in names} <= set(extras) - {"all"}


def test_every_extra_is_in_all_but_those_for_development() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"serve", "train", "ray", "vlm", "all"} <= set(extras)
    assert set(extras) - set(extras["all"][0].removeprefix("outrider[").removesuffix("]").split(",")) == {
        "all", "dev", "docs", "ray",
    }  # fmt: skip


def test_sources_without_a_repository_have_one_version() -> None:
    """The build, sources that nobody installed and the citation agree about the release that is in development."""
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools_scm"]["fallback_version"] == UNINSTALLED
    release = UNINSTALLED.partition(".dev")[0]
    assert f"version: {release}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_another_copys_installation_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package of the same name elsewhere says nothing about these sources; one of these sources does."""
    for at, expected in ((tmp_path, UNINSTALLED), (PACKAGE.parent, "7.8.9")):
        found = Installed(at)
        monkeypatch.setattr(metadata, "distribution", lambda _, found=found: found)
        assert version_here() == expected


class Installed(metadata.Distribution):
    """An installation of version 7.8.9 in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.4\nName: outrider\nVersion: 7.8.9\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        return self.folder / path


def test_no_installation_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)
    assert version_here() == UNINSTALLED


def test_the_metadata_has_addresses() -> None:
    assert PROJECT["project"]["urls"] and all(url.startswith("https://") for url in PROJECT["project"]["urls"].values())
