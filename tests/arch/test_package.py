"""What a wheel must hold beside Python files. A missing header shows only where the wheel is installed, not in a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path

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


def test_the_citation_has_the_packages_version() -> None:
    version = PROJECT["project"].get("version")
    assert version is None or f"version: {version}" in (ROOT / "CITATION.cff").read_text().splitlines()
