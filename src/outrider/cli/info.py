"""Runs ``outrider info``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from outrider.bundled import bundled_path
from outrider.models.info import describe_model
from outrider.models.source import local_path
from outrider.vision.info import with_vision


def run(arguments: argparse.Namespace) -> int:
    name = arguments.model or bundled_path("target")
    info = asdict(with_vision(describe_model(name), local_path(name)))
    if arguments.json:
        print(json.dumps(info, indent=2))
        return 0
    info["num_parameters"] = f"{info['num_parameters']:,}"
    info["num_bytes"] = f"{info['num_bytes'] / 1e6:,.1f} MB"
    info["files"] = ", ".join(info["files"])
    for name, value in info.items():
        print(f"{name.removeprefix('num_').replace('_', ' '):<14}{value}")
    return 0
