"""Deployment files name only what exists: flags of the server, its metrics, its routes, files beside them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import _parser
from outrider.server.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
yaml = pytest.importorskip("yaml")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def commands() -> dict[str, list[str]]:
    """Every command line that a file gives to ``outrider``."""
    docker = (DEPLOY / "Dockerfile").read_text()
    container = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    return {
        "Dockerfile": json.loads(re.findall(r"^CMD (.*)$", docker, re.MULTILINE)[-1]),
        "compose.yaml": documents("compose.yaml")[0]["services"]["outrider"]["command"],
        "kubernetes.yaml": container["args"],
        "kuberay.yaml": documents("kuberay.yaml")[0]["spec"]["entrypoint"].split()[1:],
    }


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "kubernetes.yaml", "kuberay.yaml"])
def test_commands_are_understood(name: str) -> None:
    words = commands()[name]
    arguments = _parser(words[0]).read(words)
    assert arguments.host == "0.0.0.0" and arguments.port == 8000


def test_grace_periods_are_longer_than_the_drain() -> None:
    drain = _parser("serve").read(commands()["kubernetes.yaml"]).drain_s
    pod = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > drain
    compose = documents("compose.yaml")[0]["services"]["outrider"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > drain


def test_a_worker_of_the_fleet_has_room_for_a_replica() -> None:
    job, service = documents("kuberay.yaml")
    arguments = _parser("serve").read(commands()["kuberay.yaml"])
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    least, most = map(int, arguments.replicas.split(":"))
    assert (workers["minReplicas"], workers["maxReplicas"]) == (least, most)
    pod = workers["template"]["spec"]
    assert float(pod["containers"][0]["resources"]["requests"]["cpu"]) >= arguments.replica_cpus
    head = cluster["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    assert min(pod["terminationGracePeriodSeconds"], head["spec"]["terminationGracePeriodSeconds"]) > arguments.drain_s


def test_the_dashboard_shows_metrics_that_exist() -> None:
    board = json.loads((DEPLOY / "grafana/dashboards/outrider.json").read_text())
    known = {sample for family in Metrics().registry.collect() for sample in _names(family)}
    shown = {
        name for panel in board["panels"] for target in panel["targets"] for name in re.findall(r"outrider:\w+", target["expr"])
    }
    assert len(shown) > 10
    assert shown <= known, shown - known
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def _names(family: Any) -> list[str]:
    if family.type == "counter":
        return [f"{family.name}_total"]
    return [f"{family.name}_bucket", f"{family.name}_sum", family.name] if family.type == "histogram" else [family.name]


def test_files_point_to_each_other() -> None:
    services = documents("compose.yaml")[0]["services"]
    for volume in (one for service in services.values() for one in service["volumes"]):
        source = volume.split(":")[0]
        assert not source.startswith(".") or (DEPLOY / source).exists(), source
    source = documents("grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"][0]
    board = json.loads((DEPLOY / "grafana/dashboards/outrider.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert documents("prometheus.yaml")[0]["scrape_configs"][0]["static_configs"][0]["targets"] == ["outrider:8000"]
    copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all((DEPLOY.parent / name).exists() for line in copied for name in line.split())


def test_images_are_made_with_the_versions_of_the_lock_file() -> None:
    root = DEPLOY.parent
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    installs = [number for number, line in enumerate(lines) if line.startswith("RUN pip install")]
    assert installs and all("-c requirements-dev.lock" in lines[number] for number in installs)
    assert not any("==" in line for line in lines if not line.startswith("#"))
    copied = next(number for number, line in enumerate(lines) if re.match("COPY .*requirements-dev.lock", line))
    assert copied < installs[0]
    pinned = {line.split("==")[0] for line in (root / "requirements-dev.lock").read_text().splitlines() if "==" in line}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = (need for name in ("serve", "otel", "ray", "vlm") for need in project["optional-dependencies"][name])
    needed = {re.split(r"[\[<>=]", need)[0].lower() for need in (*project["dependencies"], *extras)} - {"outrider"}
    assert needed <= pinned, needed - pinned
