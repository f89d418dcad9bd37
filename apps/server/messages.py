"""The messages of a conversation, and the tools that may be called in it, as requests have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from edge_spec.apps.server.fields import Body, JsonObject, OpenBody, refusal
from edge_spec.errors import UsageError

MAX_TOOLS = 128


class TextPart(OpenBody):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(OpenBody):
    """A text that declines."""

    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]
Arguments = str | JsonObject  # JSON, as a text or as it is


def joined(content: Content) -> str:
    """Returns the text of all parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


class FunctionCall(OpenBody):
    """A call as an answer had it; arguments that were not there are none."""

    name: str
    arguments: Arguments | None = None


class ToolCall(OpenBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """Parts of a content are joined; developer is another name of system. Of the assistant and of
    tools, a content that is missing is an empty text. refusal: goes before such a one.
    reasoning_content: goes to the chat template. prefix: the answer goes on with this message."""

    also: ClassVar = {
        "reasoning": "reasoning_content",
        "thinking": "reasoning_content",
        "partial": "prefix",
        "tool_name": "name",
    }
    off = frozenset(("function_call", "images", "audio"))
    keeps_others = True
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise refusal("content", f"is missing: a message of the role {self.role} needs a text")
        return self

    @property
    def text(self) -> str:
        return self.refusal or "" if self.content is None else joined(self.content)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(OpenBody):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # True: keywords that cannot be held are refused


class FunctionName(OpenBody):
    name: str


def _wrapped(given: Any) -> Any:
    """Returns a function that stands beside its type, as OpenAI's newer API has it, in the place
    that the older one has for it."""
    if not isinstance(given, dict) or "function" in given or "name" not in given:
        return given
    return {"type": given.get("type", "function"), "function": given}


class Tool(OpenBody):
    type: Literal["function"] = "function"
    function: Function

    _is_wrapped = model_validator(mode="before")(_wrapped)


class NamedTool(OpenBody):
    type: Literal["function"] = "function"
    function: FunctionName

    _is_wrapped = model_validator(mode="before")(_wrapped)


def _word(choice: Any) -> Any:
    """Returns the word where it stands as the type of an object, as Anthropic's API has it."""
    if isinstance(choice, dict) and list(choice) == ["type"]:
        return choice["type"] if choice["type"] in ("none", "auto", "required", "any") else choice
    return choice


Word = Literal["none", "auto", "required", "any"]
Choice = Annotated[Word | NamedTool, BeforeValidator(_word)]


def for_template(message: Message) -> dict[str, Any]:
    """Returns the message as chat templates read it. Calls of tools have their arguments as a
    mapping there, where the text is one; no text is no arguments. Raises UsageError for arguments
    that are nested too deeply."""
    names = {"name", "tool_call_id", "reasoning_content"}
    if message.tool_calls:
        names.add("tool_calls")
    role = "system" if message.role == "developer" else message.role
    is_silent = message.content is None and message.refusal is None and role == "assistant"
    given = {
        "role": role,
        "content": None if is_silent and message.tool_calls else message.text,
        **message.model_dump(include=names, exclude_none=True),
    }
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"].get("arguments") or {})
    return given


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    except RecursionError:
        told = "the arguments of a call are nested too deeply"
        raise UsageError(told, remedy="Give them fewer levels.") from None
