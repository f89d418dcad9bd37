"""The messages of a conversation, and the tools that may be called in it, as requests have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.fields import Body, JsonObject, OpenBody, refusal

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
    """Return the text of all parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def message_of(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    """Return a message as chat templates read it, without `others` that are None."""
    given = {name: value for name, value in others.items() if value is not None}
    if content is None and "tool_calls" not in given:
        content = ""
    return {"role": "system" if role == "developer" else role, "content": content, **given}


def answer_of(
    texts: Sequence[str], thoughts: Iterable[str], calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return an earlier answer as one message. thoughts: empty ones are none."""
    return message_of(
        "assistant",
        "".join(texts) if texts else None,
        reasoning_content="\n\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def call_of(id: str | None, name: str, arguments: Arguments | None) -> dict[str, Any]:
    """Return a call as chat templates read it. Raises ApiError for arguments that are nested too
    deeply; those that are no JSON stay a text."""
    try:
        read = json.loads(arguments or "{}") if not isinstance(arguments, dict) else arguments
    except ValueError:
        read = arguments
    except RecursionError:
        told = "the arguments of a call are nested too deeply. Give them fewer levels."
        raise ApiError(400, told) from None
    named = {} if id is None else {"id": id}
    return {**named, "type": "function", "function": {"name": name, "arguments": read}}


class FunctionCall(OpenBody):
    """A call as an answer had it; arguments that were not there are none."""

    name: str
    arguments: Arguments | None = None


class ToolCall(OpenBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """developer is another name of system. The assistant and tools may leave content out.
    refusal: read in place of content. prefix: the answer goes on with this message."""

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

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates read it. Raises ApiError as `call_of` does."""
        functions = [(each.id, each.function) for each in self.tool_calls or ()]
        calls = [call_of(id, function.name, function.arguments) for id, function in functions]
        return message_of(
            self.role,
            self.refusal if self.content is None else joined(self.content),
            name=self.name,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content,
            tool_calls=calls or None,
        )


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(OpenBody):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # True: keywords that cannot be held are refused


def _wrapped(given: Any) -> Any:
    """Return a function of OpenAI's newer form in the older one."""
    if not isinstance(given, dict) or "function" in given or "name" not in given:
        return given
    return {"type": given.get("type", "function"), "function": given}


class Tool(OpenBody):
    type: Literal["function"] = "function"
    function: Function

    _is_wrapped = model_validator(mode="before")(_wrapped)


class NamedTool(OpenBody):
    type: Literal["function"] = "function"
    function: FunctionCall

    _is_wrapped = model_validator(mode="before")(_wrapped)


def _word(choice: Any) -> Any:
    """Return the word where it stands as the type of an object, as Anthropic's API has it."""
    if isinstance(choice, dict) and list(choice) == ["type"]:
        return choice["type"] if choice["type"] in ("none", "auto", "required", "any") else choice
    return choice


Word = Literal["none", "auto", "required", "any"]
Choice = Annotated[Word | NamedTool, BeforeValidator(_word)]


def tool_of(name: str, **others: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form, without those of `others` that are None."""
    given = {name: value for name, value in others.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}
