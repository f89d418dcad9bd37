"""The documents of the Responses API, for the server's OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edge_spec.apps.server.documents import Document, Timings


class OutputText(Document):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ThoughtText(Document):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Item(Document):
    id: str
    status: Literal["completed", "incomplete"]


class OutputMessage(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputThought(_Item):
    type: Literal["reasoning"]
    summary: list[ThoughtText]
    content: list[ThoughtText] = Field(default_factory=list)
    encrypted_content: str = ""


class OutputCall(_Item):
    type: Literal["function_call"]
    call_id: str
    namespace: str = ""
    name: str
    arguments: str


class InputDetails(Document):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Document):
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ResponseUsage(Document):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Document):
    reason: Literal["max_output_tokens"]


class ResponseDocument(Document):
    """Fields of the request are repeated as they came."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputThought | OutputCall]
    usage: ResponseUsage
    timings: Timings
    edge_spec: dict[str, Any] = Field(default_factory=dict)
    instructions: str | None
    max_output_tokens: int | float | None
    max_tool_calls: Any
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: Any
    reasoning: dict[str, Any]
    safety_identifier: Any
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | float
    truncation: str
    user: Any
    background: Literal[False]
    previous_response_id: None
    service_tier: str
    store: Literal[False]
    temperature: float
    top_p: float


class TokenCount(Document):
    object: Literal["response.input_tokens"]
    input_tokens: int
