"""The messages of a conversation, and the tools that may be called in it, as requests have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from edge_spec.apps.server.body import Body, JsonObject
from edge_spec.errors import UsageError

MAX_TOOLS = 128


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A text that declines."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """Parts of a content are joined; developer is another name of system. refusal: goes before a
    content that is missing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        parts = content if isinstance(content, list) else []
        kinds = {str(part.get("type"))[:40] for part in parts if isinstance(part, dict)}
        if others := ", ".join(sorted(kinds - {"text", "refusal"})):
            raise ValueError(f"the model reads text: send parts of type text, not {others}")
        return content

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        says = self.role == "assistant" and (self.tool_calls or self.refusal is not None)
        if self.content is None and not says:
            raise ValueError(f"a message of the role {self.role} needs content")
        return self


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # True: keywords that cannot be held are refused


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None


def for_template(message: Message) -> dict[str, Any]:
    """Returns the message as chat templates read it. Calls of tools have their arguments as a
    mapping there, where the text is one; no text is no arguments. Raises UsageError for arguments
    that are nested too deeply."""
    content = message.content
    if isinstance(content, list):
        content = "".join(
            part.text if isinstance(part, TextPart) else part.refusal for part in content
        )
    elif content is None:
        content = message.refusal
    role = "system" if message.role == "developer" else message.role
    given: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            given[name] = getattr(message, name)
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in calls:
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
            except ValueError:
                continue
            except RecursionError:
                raise UsageError(
                    "the arguments of a call are nested too deeply",
                    remedy="Give them fewer levels.",
                ) from None
        given["tool_calls"] = calls
    return given
