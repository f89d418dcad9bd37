"""The items of a conversation as requests have them, and the messages that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from edge_spec.apps.server.body import OpenBody
from edge_spec.apps.server.field_names import readable
from edge_spec.apps.server.messages import (
    Arguments,
    Content,
    FunctionCall,
    Message,
    ToolCall,
    joined,
)
from edge_spec.apps.server.responses.tools import qualified
from edge_spec.apps.server.sealed_thoughts import unsealed
from edge_spec.apps.validation import by_kind


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
        return (
            told
            or unsealed(self.encrypted_content)
            or "\n\n".join(part.text for part in self.summary or ())
        )


_TAGS: dict[str | None, str] = {
    None: "<message>",
    "message": "<message>",
    "function_call": "<function_call>",
    "function_call_output": "<function_call_output>",
    "reasoning": "<reasoning>",
}


def _is_known(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "item_reference":
        raise ValueError("nothing is stored here: send the item itself, not an item_reference")
    if isinstance(kind, str) and kind not in _TAGS:
        raise ValueError(
            f"items of type {readable(kind[:40])} are not read here: send those of type message, "
            "reasoning, function_call and function_call_output"
        )
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ThoughtItem, Tag("<reasoning>")],
    by_kind('{"role": "user", "content": "..."}', {}, _TAGS),
    BeforeValidator(_is_known),
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<items>")],
    by_kind(
        'a text, or a list of items such as {"role": "user", "content": "..."}',
        {str: "<text>", list: "<items>"},
    ),
]


def messages_of(instructions: str | None, given: Input) -> list[Message]:
    """Returns the conversation as messages. What an answer was made of (a thought, a text and
    calls) becomes one message."""
    messages = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(given, str):
        return [*messages, Message(role="user", content=given)]
    return [*messages, *_joined(given)]


def _joined(items: Iterable[Item]) -> list[Message]:
    messages: list[Message] = []
    answer: Message | None = None  # the last message, while items of the same answer may follow
    for item in items:
        if isinstance(item, CallOutputItem):
            answer = None
            text = joined(item.output)
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=text))
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            messages.append(Message(role=item.role, content=joined(item.content)))
            continue
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
