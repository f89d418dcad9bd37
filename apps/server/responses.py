"""OpenAI's Responses API: items in place of messages, and a stream of named events.

Nothing is stored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from edge_spec import FinishReason, GenerationResult, Grammar, PartKind
from edge_spec.apps.server.answer import Round, Work
from edge_spec.apps.server.body import (
    MAX_TOOLS,
    Arguments,
    Body,
    Content,
    OpenBody,
    Tool,
    answer_of,
    call_of,
    joined,
    message_of,
    tool_of,
)
from edge_spec.apps.server.errors import ApiError, refused
from edge_spec.apps.server.reply import (
    PartsReply,
    chat_logprobs,
    sealed,
    server_event,
    timings,
    unsealed,
    usage,
)
from edge_spec.apps.server.schema import ConversationBody, Request, ResponseFormat, grammar_of
from edge_spec.text.parts.part import CallHead

# Agents offer these alongside their own tools without being asked to.
LeftOut = Literal["web_search", "web_search_preview", "image_generation"]


class Namespace(OpenBody):
    """Functions under a common name, such as those of a client's MCP server."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class HostedTool(OpenBody):
    """A tool that OpenAI would run. The model is not shown it."""

    type: LeftOut


def _with_type(usual: str) -> BeforeValidator:

    def read(given: Any) -> Any:
        has_none = isinstance(given, dict) and given.get("type") is None
        return {**given, "type": usual} if has_none else given

    return BeforeValidator(read)


Offered = Annotated[
    Annotated[Tool | Namespace | HostedTool, Field(discriminator="type")], _with_type("function")
]


def qualified(namespace: str | None, name: str) -> str:
    """Return the function's name as the model sees it."""
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
        """The thought, or "" if another server sealed it."""
        told = "".join(part.text for part in self.content or ())
        summary = "\n\n".join(part.text for part in self.summary or ())
        return told or unsealed(self.encrypted_content) or summary


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ThoughtItem, Field(discriminator="type")],
    _with_type("message"),
]
Input = str | Annotated[list[Item], Field(min_length=1)]


def conversation(instructions: str | None, given: Input) -> list[dict[str, Any]]:
    """Return messages for a chat template, joining an answer's items into one message.

    A call belongs to the answer before it, as does everything between calls. Without a call, a
    text or thought that follows a text begins the next answer.
    """
    spoken = [message_of("system", instructions)] if instructions else []
    if isinstance(given, str):
        return [*spoken, message_of("user", given)]
    groups: list[list[Item]] = []
    is_answer = has_text = has_call = False
    for item in given:
        goes_on = isinstance(item, CallItem) or has_call or not has_text
        if is_answer and _is_of_answer(item) and goes_on:
            groups[-1].append(item)
        else:
            groups.append([item])
            is_answer, has_text, has_call = _is_of_answer(item), False, False
        has_text = has_text or isinstance(item, MessageItem)
        has_call = has_call or isinstance(item, CallItem)
    return spoken + [_message(group) for group in groups]


def _is_of_answer(item: Item) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, CallOutputItem)


def _message(group: Sequence[Item]) -> dict[str, Any]:
    first = group[0]
    if isinstance(first, CallOutputItem):
        return message_of("tool", joined(first.output), tool_call_id=first.call_id)
    if isinstance(first, MessageItem) and first.role != "assistant":
        return message_of(first.role, joined(first.content))
    calls = [each for each in group if isinstance(each, CallItem)]
    return answer_of(
        [joined(each.content) for each in group if isinstance(each, MessageItem)],
        [each.text for each in group if isinstance(each, ThoughtItem)],
        [call_of(c.call_id, qualified(c.namespace, c.name), c.arguments) for c in calls],
    )


SCORES = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"


class TextOptions(Body):
    format: ResponseFormat | None = None


class ResponsesBody(ConversationBody):
    """Asks for the next items of a conversation. All fields of a chat request are accepted, too."""

    input: Input
    instructions: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[Offered], Field(max_length=MAX_TOOLS)] | None = None  # type: ignore[assignment]
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    n: Literal[1] | None = None
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keeps_given(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Keep the fields as sent, since the response repeats them."""
        if not isinstance(given, dict):
            return read(given)
        include = given.get("include")
        asks_scores = isinstance(include, list) and SCORES in include
        scores = asks_scores or given.get("top_logprobs")
        body = read({**given, "logprobs": True} if scores else given)
        body._given = given
        return body

    def request(self) -> Request:
        if self.tools and not self._functions:
            told = "has no function: this server runs no tools of its own, and leaves these out."
            raise refused("tools", told)
        return replace(
            super().request(),
            messages=conversation(self.instructions, self.input),
            messages_field="input",
            tools=[
                tool_of(name, **tool.function.model_dump(exclude={"name"}))
                for name, (_, tool) in self._functions.items()
            ],
        )

    @cached_property
    def _functions(self) -> dict[str, tuple[str | None, Tool]]:
        """All functions with their namespaces, by the names that the model sees."""
        found: dict[str, tuple[str | None, Tool]] = {}
        for offered in self.tools or ():
            space = offered.name if isinstance(offered, Namespace) else None
            for tool in offered.tools if isinstance(offered, Namespace) else [offered]:
                if isinstance(tool, Tool):
                    found[qualified(space, tool.function.name)] = space, tool
        return found

    def called(self, name: str) -> tuple[str | None, str]:
        """Return the namespace and unqualified name of a function that the model called."""
        space, tool = self._functions.get(name, (None, None))
        return space, tool.function.name if tool else name

    def as_sent(self, name: str, otherwise: Any = None) -> Any:
        """Return a field as sent; of tools, only those that the model is shown."""
        value = self._given.get(name)
        if name == "tools" and value is not None:
            return [tool for tool in value if tool.get("type") not in get_args(LeftOut)]
        return otherwise if value is None else value

    def forms(self) -> dict[str, Grammar | None]:
        return {
            "text.format": grammar_of(self.text.format if self.text else None),
            **super().forms(),
        }


Fields = dict[str, Any]


class _Form(NamedTuple):
    """Names in an item and its events."""

    prefix: str
    type: str
    text: str  # in events and in the part


_FORMS = {
    PartKind.TEXT: _Form("msg", "message", "output_text"),
    PartKind.REASONING: _Form("rs", "reasoning", "reasoning_text"),
    PartKind.CALL: _Form("fc", "function_call", "function_call_arguments"),
}
_REPEATED: Fields = {  # fields that the response repeats, with their defaults
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}


class ResponsesReply(PartsReply):
    """The items of an answer, in the order of writing."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._body: ResponsesBody = work.request.body
        self._num_events = 0
        self._items: list[Fields] = []
        self._new_scores: list[Any] = []  # of tokens not sent yet
        # The open item, and its place for events.
        self._form = _FORMS[PartKind.TEXT]
        self._item: Fields = {}
        self._place: Fields = {}
        self._scores: list[Any] = []
        (options,) = work.options
        self._response: Fields = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
            **{name: self._body.as_sent(name, value) for name, value in _REPEATED.items()},
            "store": False,
            "temperature": options["sampling"].temperature,
            "top_p": options["sampling"].top_p,
        }

    def opening(self) -> str:
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        if chunk.kind is PartKind.REASONING and not self._request.tells_thoughts:
            return ""
        if chunk.kind is PartKind.TEXT and self._request.logprobs is not None:
            self._new_scores += chat_logprobs(chunk.tokens)["content"]
        return super().piece(round_)

    def end(self, round_: Round, result: GenerationResult) -> str:
        is_complete = result.finish_reason is FinishReason.STOP
        told = self._finish(is_complete=is_complete, is_cut=result.is_cut)
        self._response |= {
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": _usage(result),
            "timings": timings([result]),
        }
        return told + self._event(self._response["status"], response=self._response)

    def failure(self, error: ApiError) -> str:
        num_events = self._num_events
        self._finish(is_complete=False, is_cut=True)  # keep the open item, but send no events
        self._num_events = num_events
        self._response |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
            "output": self._items,
        }
        return self._event("failed", response=self._response)

    def document(self, results: Sequence[GenerationResult]) -> Fields:
        return self._response

    def begin(self, kind: PartKind, call: CallHead | None) -> str:
        fields: Fields = {"role": "assistant", "content": []}
        self._form = _FORMS[kind]
        if call is not None:
            space, name = self._body.called(call.name)
            named = {"namespace": space, "name": name} if space else {"name": name}
            fields = {"call_id": call.id, **named, "arguments": ""}
        elif kind is PartKind.REASONING:
            fields = {"summary": []}
            if SEALED_THOUGHTS in (self._body.include or ()):
                fields["encrypted_content"] = sealed("")
        id = f"{self._form.prefix}_{secrets.token_hex(16)}"
        self._scores = []
        self._item = {"id": id, "type": self._form.type, "status": "in_progress", **fields}
        told = self._of_item("added")
        self._place = {"output_index": len(self._items), "item_id": id}
        if kind is not PartKind.CALL:
            self._place["content_index"] = 0
            told += self._event("content_part.added", **self._place, part=self._part(""))
        return told

    def add(self, text: str) -> str:
        scored: Fields = {}
        if self.open is PartKind.TEXT:
            scored, self._new_scores = {"logprobs": self._new_scores}, []
            self._scores += scored["logprobs"]
        if not text and not any(scored.values()):
            return ""
        return self._event(f"{self._form.text}.delta", **self._place, delta=text, **scored)

    def close(self, status: str = "completed") -> str:
        form, item, text = self._form, self._item, self.written
        if self.open is PartKind.CALL:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            told = self._event(f"{form.text}.done", **self._place, **done)
        else:
            part = self._part(text)
            item["content"] = [part]
            if "encrypted_content" in item:
                item["encrypted_content"] = sealed(text)
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            told = self._event(f"{form.text}.done", **self._place, **done)
            told += self._event("content_part.done", **self._place, part=part)
        item["status"] = status
        told += self._of_item("done")
        self._items.append(item)
        return told

    def _finish(self, *, is_complete: bool, is_cut: bool) -> str:
        """End the open item. A complete answer gets a message or call, which clients look for.
        is_cut: the answer ended within a call."""
        told = ""
        if is_complete and self.open in (None, PartKind.REASONING):
            told = self.begin_part(PartKind.TEXT)
        if self.open is None:
            return told
        is_whole = not is_cut if self.open is PartKind.CALL else is_complete
        return told + self.close("completed" if is_whole else "incomplete")

    def _part(self, text: str) -> Fields:
        part: Fields = {"type": self._form.text, "text": text}
        if self._form.type == "message":
            part |= {"annotations": [], "logprobs": self._scores}
        return part

    def _of_item(self, what: str) -> str:
        return self._event(f"output_item.{what}", output_index=len(self._items), item=self._item)

    def _event(self, name: str, /, **fields: Any) -> str:
        told = {"type": f"response.{name}", **fields, "sequence_number": self._num_events}
        self._num_events += 1
        return server_event(told, told["type"])


def _usage(result: GenerationResult) -> dict[str, Any]:
    counted = usage([result], 1)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": result.reasoning_n,
            **counted.get("completion_tokens_details", {}),
        },
        "total_tokens": counted["total_tokens"],
    }
