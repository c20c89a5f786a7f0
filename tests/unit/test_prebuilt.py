"""Wheels: the library that a machine without a compiler takes, the lock file, and the table of reached lines."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from outrider.models.native import build
from outrider.models.native.instruction_sets import ARM, PREBUILT, X86, sets_here
from outrider.models.native.prebuilt import file_name, prebuilt_library

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.delenv("OUTRIDER_ISA", raising=False)


@pytest.mark.usefixtures("on_linux")
def test_a_machine_takes_the_best_library_that_it_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prebuilt_library(tmp_path) is None
    names = [isa.name for isa in sets_here()]
    for name in reversed(names):  # the least first: each better one is taken as soon as it is there
        path = tmp_path / file_name(platform.machine(), name)
        path.touch()
        assert prebuilt_library(tmp_path) == path
    monkeypatch.setenv("OUTRIDER_ISA", "generic")
    assert prebuilt_library(tmp_path) == tmp_path / file_name(platform.machine(), "generic")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert prebuilt_library(tmp_path) is None


@pytest.mark.usefixtures("on_linux")
def test_the_wheels_library_stands_in_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_NATIVE", raising=False)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "prebuilt_library", lambda: None)
    assert not build.can_build()
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        assert build.Build().wait() is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(build, "prebuilt_library", lambda: broken)
    assert build.can_build()
    with pytest.warns(UserWarning, match="of the wheel could not be loaded"):
        assert build.Build().wait() is None
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    assert not build.can_build() and build.Build().wait() is None


def test_a_wheel_has_a_library_for_every_set_of_its_machine() -> None:
    wheels = script("wheels")
    for machine, sets in (("x86_64", X86), ("aarch64", ARM)):
        assert wheels.SETS[machine] == {isa.name: isa.flags for isa in sets}
    assert set(build.FLAGS) <= set(wheels.FLAGS)
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["outrider"]
    folder = PREBUILT.relative_to(Path(build.__file__).parents[2])
    assert f"{folder.as_posix()}/*.so" in patterns


def test_the_oldest_c_library_is_read_out_of_the_symbols(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"..GLIBC_2.17\0GLIBC_2.2.5\0")
    (tmp_path / "b.so").write_bytes(b"GLIBC_2.29\0")
    assert script("wheels").oldest_libc([tmp_path / "a.so", tmp_path / "b.so"]) == (2, 29)


def test_the_lock_agrees_with_what_the_project_asks_for() -> None:
    lock = script("lock")
    text = lock.LOCK.read_text()
    locked = lock.read_lock(text)
    direct = {lock.named(need.name): need for need in lock.wanted()}
    assert {"torch", "numpy", "pytest", "fastapi"} <= set(direct) & set(locked)
    for name in set(direct) & set(locked):
        assert direct[name].specifier.contains(locked[name]), f"run make lock: {name} is locked to {locked[name]}"
    assert "://" not in text and "@" not in text


def test_the_table_of_reached_lines() -> None:
    def file(reached: int, lines: int) -> dict[str, dict[str, int]]:
        return {"summary": {"covered_lines": reached, "num_statements": lines}}

    files = {"src/outrider/core/a.py": file(3, 4), "src/outrider/core/b.py": file(1, 4), "src/outrider/api.py": file(2, 2)}
    found = script("coverage_table")
    expected = [("(top)", 2, "100.0%"), ("core", 8, "50.0%"), ("all", 10, "60.0%")]
    for where in ("", "/home/me/outrider/"):  # a checkout that has the package's name
        rows = found.rows({"files": {where + path: counts for path, counts in files.items()}})
        assert [tuple(row.values()) for row in rows] == expected
    made = {"command": "make it", "machine": "a machine"}
    assert found.document({"files": files, "made": made}) == {**made, "rows": rows}


def test_costs_of_tests_are_added_up_by_folder(tmp_path: Path) -> None:
    files = {
        "(imports)": {"gw0": 9.0, "gw1": 8.0},
        "tests/unit/test_a.py": {"a": 1.0, "b": 0.5},
        "tests/server/test_c.py": {"c": 2.0},
    }
    rows = script("test_costs").rows(files)
    assert [tuple(row.values()) for row in rows] == [("server", 1, 2.0), ("unit", 2, 1.5), ("all", 3, 3.5)]
    notes = {"gw0": [["(imports)", 9.0], ["tests/unit/test_a.py::a", 1.0]], "gw1": [["tests/unit/test_a.py::b[x::y]", 0.5]]}
    for worker, lines in notes.items():
        (tmp_path / f"{worker}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = script("test_costs").read_costs(tmp_path)
    assert found == {"(imports)": {"gw0": 9.0}, "tests/unit/test_a.py": {"a": 1.0, "b[x::y]": 0.5}}


def test_a_wheels_tag_names_its_machine() -> None:
    machine_of = script("check_wheel").machine_of
    for machine in ("x86_64", "aarch64"):
        assert machine_of(Path(f"dist/outrider-0.1.0-py3-none-manylinux_2_36_{machine}.whl")) == machine
