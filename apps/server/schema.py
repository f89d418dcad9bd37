"""The fields of requests. Types are strict, unknown fields are ignored, as OpenAI's clients expect.

Fields that would change the answer and are not supported are refused, never passed over.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from edge_spec.apps.server.body import Body, JsonObject
from edge_spec.apps.server.messages import MAX_TOOLS, Choice, Message, TextPart, Tool
from edge_spec.core.sampling import LEAST_PENALTY

MAX_CHOICES = 16
MAX_STOPS = 16
_SEEDS = 2**64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Speculative(Body):
    """drafter: None is the server's own. tokens: tell where each token came from."""

    drafter: Annotated[str, Field(max_length=200)] | None = None
    tokens: bool = False


class StreamOptions(Body):
    include_usage: bool | None = False


class Prediction(Body):
    """What most of the answer is expected to be, such as a file before a small change."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class _AnswerRequest(Body):
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
    prediction: Prediction | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def seed_of(self, choice: int) -> int | None:
        """Choices with the same seed would be the same."""
        return None if self.seed is None else (self.seed + choice) % _SEEDS


class TextFormat(Body):
    type: Literal["text", "json_object"]


class JsonSchema(Body):
    name: str | None = None
    json_schema: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None  # False: keywords that cannot be held are passed over


class SchemaFormat(Body):
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
