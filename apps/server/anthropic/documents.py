"""The documents of Anthropic's API, for the server's OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

from edge_spec.apps.server.documents import Document


class FailureDetail(Document):
    type: str
    message: str


class FailureDocument(Document):
    type: Literal["error"]
    error: FailureDetail


class TextBlock(Document):
    type: Literal["text"]
    text: str


class ThinkingBlock(Document):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Document):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Document):
    thinking_tokens: int


class MessageUsage(Document):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageDocument(Document):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Document):
    input_tokens: int
