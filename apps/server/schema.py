"""The fields of requests. Types are strict, unknown fields are ignored, as OpenAI's clients expect.

Fields that would change the answer and are not supported are refused, never passed over.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from edge_spec.core.sampling import LEAST_PENALTY
from edge_spec.errors import UsageError

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_TOOLS = 128
_SEEDS = 2**64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
JsonObject = dict[str, JsonValue]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Speculative(_Body):
    """drafter: None is the server's own. tokens: tell where each token came from."""

    drafter: Annotated[str, Field(max_length=200)] | None = None
    tokens: bool = False


class StreamOptions(_Body):
    include_usage: bool | None = False


class _AnswerRequest(_Body):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Literal[0] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=10)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    speculative: Speculative | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def seed_of(self, choice: int) -> int | None:
        """Choices with the same seed would be the same."""
        return None if self.seed is None else (self.seed + choice) % _SEEDS


class TextPart(_Body):
    type: Literal["text"]
    text: str


class RefusalPart(_Body):
    """A text that declines."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
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


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(_Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(_Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None


class TextFormat(_Body):
    type: Literal["text", "json_object"]


class JsonSchema(_Body):
    name: str | None = None
    json_schema: Annotated[JsonObject, Field(alias="schema")]


class SchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(_AnswerRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None  # goes before max_tokens
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | SchemaFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    functions: JsonValue = None
    function_call: JsonValue = None

    @field_validator("functions", "function_call")
    @classmethod
    def _is_left_out(cls, value: JsonValue) -> JsonValue:
        if value is not None:
            raise ValueError("this is not supported; send tools and tool_choice")
        return value


class CompletionRequest(_AnswerRequest):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError("best_of other than n is not supported")
        return self


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
