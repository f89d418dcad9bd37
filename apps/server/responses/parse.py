"""Requests of the Responses API, read as those of conversations here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic.json_schema import SkipJsonSchema

from edge_spec.apps.server.fields import HARMLESS, Body, OpenBody, refusal
from edge_spec.apps.server.messages import (
    MAX_TOOLS,
    Arguments,
    Content,
    FunctionCall,
    Message,
    Tool,
    ToolCall,
    joined,
)
from edge_spec.apps.server.reply import unsealed
from edge_spec.apps.server.schema import (
    AskedForm,
    ChatRequest,
    Reasoning,
    ResponseFormat,
    asked_format,
)

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


def _with_type(usual: str) -> BeforeValidator:
    """Read an object without a type as one of the usual type."""

    def read(given: Any) -> Any:
        has_none = isinstance(given, dict) and given.get("type") is None
        return {**given, "type": usual} if has_none else given

    return BeforeValidator(read)


Offered = Annotated[
    Annotated[Tool | Namespace | HostedTool, Field(discriminator="type")], _with_type("function")
]


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name that the model knows a function by."""
    return f"{namespace}__{name}" if namespace else name


class MessageItem(OpenBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(OpenBody):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments | None = None


class CallOutputItem(OpenBody):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ThoughtText(OpenBody):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ThoughtItem(OpenBody):
    """A thought of an earlier answer, as a text, a summary or sealed."""

    type: Literal["reasoning"]
    summary: list[ThoughtText] | None = None
    content: list[ThoughtText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """Returns what is known of it; "" of a thought that another server sealed."""
        told = "".join(part.text for part in self.content or ())
        summary = "\n\n".join(part.text for part in self.summary or ())
        return told or unsealed(self.encrypted_content) or summary


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ThoughtItem, Field(discriminator="type")],
    _with_type("message"),
]
Input = str | Annotated[list[Item], Field(min_length=1)]


def messages_of(instructions: str | None, given: Input) -> list[Message]:
    """Returns the conversation as messages. What an answer was made of (a thought, a text and
    calls) becomes one message."""
    messages = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(given, str):
        return [*messages, Message(role="user", content=given)]
    answer: Message | None = None  # the last message, while items of the same answer may follow
    for item in given:
        if isinstance(item, CallOutputItem):
            answer, text = None, joined(item.output)
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=text))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            messages.append(Message(role=item.role, content=joined(item.content)))
        else:
            if answer is None or not _goes_on(answer, item):
                answer = Message(role="assistant")
                messages.append(answer)
            _add(item, answer)
    return messages


def _goes_on(answer: Message, item: Item) -> bool:
    """Says whether an item belongs to the answer before it. A call does; so does all that stands
    between calls, whose outputs come after the last one. A text or thought after a text is the next
    answer."""
    return isinstance(item, CallItem) or bool(answer.tool_calls) or answer.content is None


def _add(item: Item, answer: Message) -> None:
    if isinstance(item, CallItem):
        name = qualified(item.namespace, item.name)
        function = FunctionCall(name=name, arguments=item.arguments)
        call = ToolCall(id=item.call_id, function=function)
        answer.tool_calls = [*(answer.tool_calls or ()), call]
    elif isinstance(item, ThoughtItem):
        thoughts = [answer.reasoning_content or "", item.text]
        answer.reasoning_content = "\n\n".join(filter(None, thoughts)) or None
    elif isinstance(item, MessageItem):
        answer.content = answer.text + joined(item.content)


SCORES = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"
# Of tools that OpenAI runs, of its caches, and what Codex says about itself.
_HARMLESS = frozenset(("max_tool_calls", "prompt_cache_options", "client_metadata", "image"))


class TextOptions(Body):
    off = frozenset(("verbosity",))
    format: ResponseFormat | None = None


class ReasoningOptions(Reasoning):
    """summary: where it is asked for, the thought is told as its own summary, which is where such a
    client looks for it."""

    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ChatRequest):
    """Asks for the next items of a conversation. It is read as the chat request that it stands for,
    so that all fields of such a request may be sent, too."""

    harmless = HARMLESS | _HARMLESS
    shown_as: ClassVar = {"messages": "input"}
    messages: SkipJsonSchema[list[Message]] = Field(default_factory=list)
    input: Input
    instructions: str | None = None
    text: TextOptions | None = None
    # Functions alone when the request has been read, under the names that the model knows.
    tools: Annotated[list[Offered], Field(max_length=MAX_TOOLS)] | None = None  # type: ignore[assignment]
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    n: Literal[1] | None = None
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _names: dict[str, tuple[str | None, str]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keeps_given(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Keeps the fields as they came, since a response repeats them."""
        if not isinstance(given, dict):
            return read(given)
        if given.get("messages") is not None:
            raise refusal("messages", "belongs to POST /v1/chat/completions: send input")
        include = given.get("include")
        asks_scores = isinstance(include, list) and SCORES in include
        scores = asks_scores or given.get("top_logprobs")
        request = read({**given, "logprobs": True} if scores else given)
        request._given = given
        request.messages = messages_of(request.instructions, request.input)
        request._take_functions()
        return request

    def _take_functions(self) -> None:
        """Have the model know all functions, each by a name that tells its namespace."""
        functions: list[Tool] = []
        for offered in self.tools or ():
            space = offered.name if isinstance(offered, Namespace) else None
            tools = offered.tools if isinstance(offered, Namespace) else [offered]
            for function in (tool.function for tool in tools if isinstance(tool, Tool)):
                name = qualified(space, function.name)
                self._names[name] = (space, function.name)
                functions.append(Tool(function=function.model_copy(update={"name": name})))
        if self.tools and not functions:
            told = "has no function: this server runs no tools of its own, and leaves these out"
            raise refusal("tools", told)
        self.tools = list(functions) if self.tools else self.tools

    def called(self, name: str) -> tuple[str | None, str]:
        """Returns the namespace and the own name of a function that the model calls."""
        return self._names.get(name, (None, name))

    @property
    def seals_thoughts(self) -> bool:
        return SEALED_THOUGHTS in (self.include or ())

    @property
    def summarizes(self) -> bool:
        """Says whether thoughts are told as summaries."""
        return self.reasoning is not None and self.reasoning.summary is not None

    def as_sent(self, name: str, otherwise: Any = None) -> Any:
        """Returns a field as it came, and of the tools those that the model is told of."""
        value = self._given.get(name)
        if name == "tools" and value is not None:
            return [tool for tool in value if tool.get("type") not in LEFT_OUT]
        return otherwise if value is None else value

    def _forms(self) -> Iterator[AskedForm]:
        if self.text is not None:
            yield from asked_format("text.format", self.text.format)
        yield from super()._forms()
