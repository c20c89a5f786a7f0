"""The state from which a killed run continues exactly: weights, optimiser, random numbers, step and judgements, in one file
that is replaced whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import ModelError, OptionError
from outrider.models.checkpoint import replace_file
from outrider.train.devices import divided_like, whole
from outrider.train.run import Run

_NAME = "state.pt"
_MAY_CHANGE = ("max_steps", "max_seconds", "judge_every", "save_every", "patience", "learning_rate", "bf16", "store")
"""Settings that may change when a run is resumed."""


def save_state(out: Path, runs: Sequence[Run], step: int, elapsed: float, settings: dict[str, Any]) -> None:
    """Replace the saved state atomically."""
    team = runs[0].team
    random = team.everybodys(torch.get_rng_state())
    state: dict[str, Any] = {
        "step": step,
        "elapsed": elapsed,
        "settings": settings,
        "random": random,
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "runs": {
            run.objective.name: {
                "module": whole(run.objective.module.state_dict()),
                "optimizer": whole(run.optimizer.state_dict()),
                "best": run.best,
                "since_best": run.since_best,
                "history": run.history,
            }
            for run in runs
        },
    }
    if not team.is_first:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / _NAME, lambda path: torch.save(state, path))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{out / _NAME} cannot be written ({error}); the previous state is complete: free disk space, then resume"
        ) from error


def load_state(out: Path, runs: Sequence[Run], settings: dict[str, Any]) -> tuple[int, float]:
    """Restore the state. Returns the next step and the seconds spent; 0, 0 without a saved state."""
    path = out / _NAME
    if not path.is_file():
        return 0, 0.0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the unpickler say
        raise ModelError(f"{path} cannot be read ({error}); remove it to start again") from None
    _check(path, state, runs, settings)
    for run in runs:
        mine = state["runs"][run.objective.name]
        now = run.objective.module.state_dict()
        run.objective.module.load_state_dict({name: divided_like(mine["module"][name], now[name]) for name in now})
        run.optimizer.load_state_dict(_divided(mine["optimizer"], run.optimizer))
        run.best, run.since_best, run.history = mine["best"], mine["since_best"], list(mine["history"])
    if len(state["random"]) == runs[0].team.size:
        torch.set_rng_state(state["random"][runs[0].team.rank])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])
    return int(state["step"]), float(state["elapsed"])


def _divided(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's full state, sharded like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {
        index: {name: divided_like(value, parameters[index]) if name != "step" else value for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": found}


def _check(path: Path, state: dict[str, Any], runs: Sequence[Run], settings: dict[str, Any]) -> None:
    names = sorted(run.objective.name for run in runs)
    if sorted(state["runs"]) != names:
        raise OptionError(
            f"{path} is a run of {', '.join(sorted(state['runs']))} and this one is of {', '.join(names)}; use another --out"
        )
    for name, value in settings.items():
        before = state["settings"].get(name)
        same = before == value or (isinstance(value, float) and isinstance(before, float) and math.isclose(before, value))
        if not same and name not in _MAY_CHANGE:
            raise OptionError(
                f"{path} was made with {name} = {before!r}, not {value!r}; resume with that, or use another --out"
            )
