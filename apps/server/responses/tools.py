"""The tools of a request: functions, those of a namespace, and those that OpenAI runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from edge_spec.apps.server.body import OpenBody
from edge_spec.apps.server.messages import MAX_TOOLS, Tool
from edge_spec.apps.validation import chosen_by

# Agents offer these beside their own tools without being asked to.
LEFT_OUT = ("web_search", "web_search_preview", "image_generation")


class Namespace(OpenBody):
    """Functions under a common name, such as those of an MCP server of the client's."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class HostedTool(OpenBody):
    """A tool that OpenAI would run; the model is not told of it."""

    type: Literal["web_search", "web_search_preview", "image_generation"]


def _tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "namespace":
        return "<namespace>"
    return "<hosted>" if kind in LEFT_OUT else "<function>"


Offered = Annotated[
    Annotated[Tool, Tag("<function>")]
    | Annotated[Namespace, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    chosen_by(_tag, '{"type": "function", "name": "...", "parameters": {...}}'),
]


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name that the model knows a function by."""
    return f"{namespace}__{name}" if namespace else name


def functions_of(
    offered: Sequence[Tool | Namespace | HostedTool],
) -> Iterator[tuple[str | None, str, Tool]]:
    """Returns the functions that the model may call, each with its namespace and its own name."""
    for tool in offered:
        if isinstance(tool, Tool):
            yield None, tool.function.name, tool
        elif isinstance(tool, Namespace):
            for each in tool.tools:
                function = each.function
                known = function.model_copy(update={"name": qualified(tool.name, function.name)})
                yield tool.name, function.name, Tool(function=known)
