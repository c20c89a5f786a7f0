"""Everything that can be trained besides heads, by name: draft models, adapters, small networks of other methods, and the
target itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.train.acceptance import AcceptanceObjective, AcceptanceSettings
from outrider.train.distill import DistillSettings, distillation, new_distillation, new_kangaroo
from outrider.train.draft_lm import DraftLM
from outrider.train.layerskip import LayerSkipObjective, LayerSkipSettings
from outrider.train.objective import Objective
from outrider.train.objective_joint import JointSettings, new_joint
from outrider.train.sorted import SortedObjective, SortedSettings
from outrider.train.specee import SpecEEObjective, SpecEESettings

DRAFT_SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, eq=False)
class TrainingRequest:
    """The user's request."""

    kind: str
    target_name: str
    target: Target
    draft: str | None
    reference: str | None
    given: Mapping[str, Any]

    def settings(self, kind: type) -> Any:
        names = {item.name for item in fields(kind)}
        return kind(**{name: value for name, value in self.given.items() if name in names})


@dataclass(frozen=True, eq=False)
class Trainable:
    """Makes an objective, with its options beside its settings."""

    build: Callable[[TrainingRequest], Objective]
    settings: type
    more: tuple[str, ...] = ()

    @property
    def options(self) -> set[str]:
        return {item.name for item in fields(self.settings)} | set(self.more)


def _distill(asked: TrainingRequest) -> Objective:
    settings = asked.settings(DistillSettings)
    objective = new_distillation(asked.kind, asked.target, draft=asked.draft, reference=asked.reference, settings=settings)
    return _lean(objective, asked)


def _pretrain(asked: TrainingRequest) -> Objective:
    """Train the named draft on text; without a name, an untrained one."""
    if asked.draft is not None:
        return _distill(asked)
    if asked.reference is not None:
        raise OptionError("pretrain uses no reference model; leave --reference out")
    draft = _fresh(asked)
    return _lean(distillation(asked.kind, draft, asked.target, asked.settings(DistillSettings)), asked)


def _fresh(asked: TrainingRequest, **shape: int) -> DraftLM:
    """An untrained draft of the requested shape."""
    changes = {name: asked.given[name] for name in DRAFT_SHAPE if name in asked.given}
    return DraftLM.fresh(asked.target_name, {**shape, **changes}, asked.target.device)


def _sorted(asked: TrainingRequest) -> Objective:
    """Train the exits of the named draft; without a name, of an untrained one."""
    device = asked.target.device
    draft = _fresh(asked, num_hidden_layers=4) if asked.draft is None else DraftLM.load(asked.draft, device)
    return _lean(SortedObjective(draft, asked.target, asked.settings(SortedSettings)), asked)


def _lean(objective: Objective, asked: TrainingRequest) -> Objective:
    """The objective, with gradient checkpointing if requested."""
    if isinstance(objective.module, DraftLM):
        objective.module.recompute = bool(asked.given.get("recompute_layers", False))
    return objective


def _kangaroo(asked: TrainingRequest) -> Objective:
    settings = asked.settings(DistillSettings)
    return new_kangaroo(asked.target_name, asked.target, settings, exit_layer=asked.given.get("exit_layer"))


def _layerskip(asked: TrainingRequest) -> Objective:
    model = DraftLM.load(asked.draft or asked.target_name, asked.target.device)
    return _lean(LayerSkipObjective(model, asked.target, asked.settings(LayerSkipSettings)), asked)


def _medusa2(asked: TrainingRequest) -> Objective:
    return new_joint(asked.target_name, asked.target, asked.settings(JointSettings))


def _acceptance(asked: TrainingRequest) -> Objective:
    if asked.draft is None:
        raise OptionError("an acceptance head belongs to a draft model; give --draft")
    draft = DraftLM.load(asked.draft, asked.target.device)
    return AcceptanceObjective(draft, asked.target, asked.settings(AcceptanceSettings))


def _specee(asked: TrainingRequest) -> Objective:
    return SpecEEObjective(asked.target, asked.settings(SpecEESettings))


_LEAN = ("recompute_layers",)

OTHER_KINDS: Mapping[str, Trainable] = {
    "distill": Trainable(_distill, DistillSettings, _LEAN),
    "adaspec": Trainable(_distill, DistillSettings, _LEAN),
    "pretrain": Trainable(_pretrain, DistillSettings, (*_LEAN, *DRAFT_SHAPE)),
    "sorted": Trainable(_sorted, SortedSettings, (*_LEAN, *DRAFT_SHAPE)),
    "kangaroo": Trainable(_kangaroo, DistillSettings, ("exit_layer",)),
    "layerskip": Trainable(_layerskip, LayerSkipSettings, _LEAN),
    "medusa2": Trainable(_medusa2, JointSettings),
    "acceptance-head": Trainable(_acceptance, AcceptanceSettings),
    "specee": Trainable(_specee, SpecEESettings),
}
