"""The messages of Anthropic's API: their blocks, and what each is in a conversation here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Tag, model_validator

from edge_spec.apps.server.body import JsonObject, OpenBody
from edge_spec.apps.server.field_names import refusal
from edge_spec.apps.server.messages import Content, TextPart, joined, only
from edge_spec.apps.server.sealed_thoughts import unsealed
from edge_spec.apps.validation import by_kind

# What Claude Code tells Anthropic's servers at the beginning of the system's text. It is for no
# model, and other in each request, so that nothing that comes after it would be read once only.
_FOR_SERVERS = re.compile(r"\Ax-anthropic-billing-header:(?: *[\w-]+=[^;\n]*;)*\n?")


class Thinking(OpenBody):
    """What an earlier answer thought. signature: as the answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""

    @property
    def thought(self) -> str:
        return self.thinking or unsealed(self.signature)


class RedactedThinking(OpenBody):
    """A thought that only its own maker can read."""

    type: Literal["redacted_thinking"]


class ToolUse(OpenBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolReference(OpenBody):
    """Names a tool that was searched for. All tools are in the prompt here."""

    type: Literal["tool_reference"]
    tool_name: str


_RESULT_BLOCKS: dict[str | None, str] = {"text": "<text>", "tool_reference": "<reference>"}
ResultBlock = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ToolReference, Tag("<reference>")],
    by_kind('{"type": "text", "text": "..."}', {}, _RESULT_BLOCKS),
    only(_RESULT_BLOCKS, "blocks of type text"),
]


class ToolResult(OpenBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[ResultBlock], Tag("<blocks>")],
            by_kind("a text, or a list of blocks", {str: "<text>", list: "<blocks>"}),
        ]
        | None
    ) = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """Returns what the model reads of it; templates have no other place for an error."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = (b.text if isinstance(b, TextPart) else b.tool_name for b in content)
            content = "\n".join(texts)
        return f"Error: {content}" if self.is_error else content


_BLOCKS: dict[str | None, str] = {
    name: f"<{name}>" for name in ("text", "thinking", "redacted_thinking", "tool_use")
}
_BLOCKS["tool_result"] = "<tool_result>"
Block = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[Thinking, Tag("<thinking>")]
    | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")],
    by_kind('{"type": "text", "text": "..."}', {}, _BLOCKS),
    only(_BLOCKS, "blocks of type text, thinking, tool_use or tool_result"),
]
Blocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Block], Tag("<blocks>")],
    by_kind("a text, or a list of blocks", {str: "<text>", list: "<blocks>"}),
]
_ROLES = {ToolResult: "user", Thinking: "assistant", RedactedThinking: "assistant"}
_ROLES[ToolUse] = "assistant"


class Message(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _has_its_own_blocks(self) -> Message:
        for block in self.blocks:
            if _ROLES.get(type(block), self.role) != self.role:
                told = f"has {block.type}, which no message of the role {self.role} has"
                raise refusal("content", told)
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)] if self.content else []
        return self.content


def conversation(system: Content | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as `messages.Message` has them: results of tools are messages of their
    own, which go before what the user says."""
    told = _system(system)
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    spoken = [each for message in messages for each in _spoken(message, names)]
    return [{"role": "system", "content": told}, *spoken] if told else spoken


def _system(content: Content | None) -> str:
    texts = [content] if isinstance(content, str) else [joined([part]) for part in content or ()]
    return "\n".join(text for text in (_FOR_SERVERS.sub("", each) for each in texts) if text)


def _spoken(message: Message, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    texts = [block.text for block in message.blocks if isinstance(block, TextPart)]
    if message.role == "assistant":
        calls = [block for block in message.blocks if isinstance(block, ToolUse)]
        names |= {call.id: call.name for call in calls}
        thoughts = [each.thought for each in message.blocks if isinstance(each, Thinking)]
        yield {
            "role": "assistant",
            "content": "".join(texts) if texts or not calls else None,
            "reasoning_content": "\n\n".join(filter(None, thoughts)) or None,
            "tool_calls": [_call(call) for call in calls] or None,
        }
        return
    results = [block for block in message.blocks if isinstance(block, ToolResult)]
    for result in results:
        yield {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "name": names.get(result.tool_use_id),
            "content": result.text,
        }
    if texts or not results:
        yield {"role": message.role, "content": "\n".join(texts)}


def _call(call: ToolUse) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.input}
    return {"id": call.id, "type": "function", "function": function}
