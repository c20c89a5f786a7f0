"""Tools in requests: which tools may be called, and which must be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class FunctionSpec(BaseModel):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool. Hints of other servers beside it (``cache_control``) mean nothing here."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class ToolChoice(BaseModel):
    """The one tool that must be called."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedNames(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=128)]


class AllowedTools(BaseModel):
    """The tools that may be called."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames
