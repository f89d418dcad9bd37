"""The fields of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic.json_schema import SkipJsonSchema

from edge_spec.apps.server import other_servers as others
from edge_spec.apps.server.body import Body
from edge_spec.apps.server.field_names import Off, OtherNames, refusal
from edge_spec.apps.server.forms import AskedForm, ResponseFormat, asked_format
from edge_spec.apps.server.messages import MAX_TOOLS, Message
from edge_spec.apps.server.reasoning import Reasoning
from edge_spec.apps.server.responses.items import Input, messages_of
from edge_spec.apps.server.responses.tools import LEFT_OUT, Offered, functions_of
from edge_spec.apps.server.schema import ChatRequest

SCORES = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"
_WHOLE = "nothing is stored here, so send the whole conversation as input"
_OFF = {
    **ChatRequest.other_names.off,
    "previous_response_id": Off((), _WHOLE),
    "conversation": Off((), _WHOLE),
    "prompt": Off((), "nothing is stored here, so send instructions and input"),
    "background": Off((False,), "nothing is stored here, so stream the answer"),
    "context_management": Off(([],), "shorten the input"),
    "moderation": Off(),
}
del _OFF["input"], _OFF["instructions"]
_HARMLESS = ChatRequest.other_names.harmless | {
    # of tools that OpenAI runs, of its caches, and what Codex says about itself
    *("max_tool_calls", "prompt_cache_options", "client_metadata", "image"),
}


class TextOptions(Body):
    other_names = OtherNames(off={"verbosity": others.CHAT_OFF["verbosity"]})
    format: ResponseFormat | None = None


class ReasoningOptions(Reasoning):
    """summary: where it is asked for, the thought is told as its own summary, which is where such a
    client looks for it."""

    other_names = OtherNames(
        also={**Reasoning.other_names.also, "generate_summary": "summary"},
        harmless=Reasoning.other_names.harmless,
        off={
            **Reasoning.other_names.off,
            "context": Off(("auto",), "the model's chat template says which thoughts it reads"),
            "mode": Off(("standard",)),
        },
    )
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ChatRequest):
    """Asks for the next items of a conversation. It is read as the chat request that it stands for,
    so that all fields of such a request may be sent, too."""

    other_names = OtherNames(ChatRequest.other_names.also, _HARMLESS, _OFF)
    shown_as: ClassVar = {"messages": "input"}
    messages: SkipJsonSchema[list[Message]] = Field(default_factory=list)
    input: Input
    instructions: str | None = None
    text: TextOptions | None = None
    # Functions alone when the request has been read, under the names that the model knows.
    tools: Annotated[list[Offered], Field(max_length=MAX_TOOLS)] | None = None  # type: ignore[assignment]
    reasoning: ReasoningOptions | None = None
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                # of items that there are none of here
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
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
        if self.tools is None:
            return
        functions = list(functions_of(self.tools))
        if self.tools and not functions:
            raise refusal(
                "tools",
                "has no function: this server runs no tools of its own, and leaves these out",
            )
        self._names = {tool.function.name: (space, name) for space, name, tool in functions}
        self.tools = [tool for _, _, tool in functions]

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
