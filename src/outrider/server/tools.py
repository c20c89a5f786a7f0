"""Which tools an answer may call and which it must call, and the grammar that follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import nearest
from outrider.server.failures import ApiError
from outrider.server.protocol import ChatRequest
from outrider.server.tool_protocol import AllowedTools, FunctionName, FunctionSpec, ToolChoice

NUM_CALLS = {"minItems": 1, "maxItems": 16}
"""Fewest and most calls in an answer that may make several. Without a limit, a small model could write calls up to its last
token."""


@dataclass(frozen=True)
class ToolPlan:
    """Which tools an answer may or must call."""

    specs: tuple[FunctionSpec, ...] = ()
    """Tools that may be called."""
    function: str | None = None
    """The one tool that must be called. The answer is its arguments."""
    must_call: bool = False
    """Whether some of several tools must be called. A call is then ``{"name": ..., "arguments": ...}``."""
    is_parallel: bool = False
    """Whether the answer may make several of these calls. It is then an array of them."""
    is_required: bool = False
    """Whether ``function`` is the only tool, and not the one that the request named."""
    is_legacy: bool = False
    """Whether tools were given as ``functions``, so that calls are returned as ``function_call``."""

    @property
    def arguments(self) -> dict[str, Mapping[str, Any]]:
        """The schema of every tool's arguments, by name."""
        return {spec.name: _parameters(spec) for spec in self.specs}

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": spec.model_dump(exclude_none=True)} for spec in self.specs]

    def schema(self) -> Mapping[str, Any] | None:
        """The schema of the whole answer; None leaves it to the model."""
        if self.function is not None:
            return _parameters(next(spec for spec in self.specs if spec.name == self.function))
        if not self.must_call:
            return None
        call = {"anyOf": [_call_schema(spec) for spec in self.specs]}
        return {"type": "array", "items": call, **NUM_CALLS} if self.is_parallel else call


def plan_tools(body: ChatRequest) -> ToolPlan:
    """Read ``tools`` and ``tool_choice``, or the older ``functions`` and ``function_call``."""
    if body.functions is not None:
        if body.tools:
            raise ApiError(400, "tools and functions mean the same; send only one of them", param="functions")
        return _planned(tuple(body.functions), _legacy_choice(body), is_legacy=True)
    specs = tuple(tool.function for tool in body.tools or ())
    return _planned(specs, body.tool_choice, is_parallel=body.parallel_tool_calls)


def _legacy_choice(body: ChatRequest) -> str | ToolChoice | None:
    if isinstance(body.function_call, FunctionName):
        return ToolChoice(type="function", function=body.function_call)
    return body.function_call


def _planned(
    specs: tuple[FunctionSpec, ...],
    choice: str | ToolChoice | AllowedTools | None,
    *,
    is_legacy: bool = False,
    is_parallel: bool = False,
) -> ToolPlan:
    if isinstance(choice, AllowedTools):
        specs = tuple(_named(specs, tool.function.name) for tool in choice.allowed_tools.tools)
        choice = choice.allowed_tools.mode
    if choice == "none" or (not specs and choice in (None, "auto")):
        return ToolPlan()
    if isinstance(choice, ToolChoice):
        return ToolPlan(specs, _named(specs, choice.function.name).name, is_legacy=is_legacy)
    if choice == "required" and not specs:
        raise ApiError(400, "tool_choice is 'required' and there are no tools; give some, or use 'auto'", param="tool_choice")
    if choice == "required" and len(specs) == 1:
        return ToolPlan(specs, specs[0].name, is_required=True, is_legacy=is_legacy)
    return ToolPlan(specs, must_call=choice == "required", is_legacy=is_legacy, is_parallel=is_parallel)


def _named(specs: tuple[FunctionSpec, ...], name: str) -> FunctionSpec:
    found = next((spec for spec in specs if spec.name == name), None)
    if found is None:
        hint = nearest(name, [spec.name for spec in specs])
        raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools; {hint}", param="tool_choice")
    return found


def _parameters(spec: FunctionSpec) -> Mapping[str, Any]:
    return spec.parameters or {"type": "object"}


def _call_schema(spec: FunctionSpec) -> dict[str, Any]:
    properties = {"name": {"const": spec.name}, "arguments": _parameters(spec)}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}
