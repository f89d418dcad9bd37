"""Anthropic's Messages API: bodies, replies, errors and token counts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edge_spec import FinishReason, GenerationResult, Grammar, PartKind, Stats
from edge_spec.apps.server.answer import Round, Work
from edge_spec.apps.server.body import (
    MAX_TOOLS,
    Body,
    Content,
    Count,
    JsonObject,
    OpenBody,
    TextPart,
    ToolName,
    answer_of,
    call_of,
    joined,
    message_of,
    tool_of,
)
from edge_spec.apps.server.errors import ApiError, refused
from edge_spec.apps.server.reply import PartsReply, arguments_of, sealed, server_event, unsealed
from edge_spec.apps.server.schema import (
    AnswerBody,
    Request,
    SchemaFormat,
    grammar_of,
    prompt_options,
)
from edge_spec.text.parts.part import CallHead

# Claude Code begins the system text with a header for Anthropic's servers. It is not meant for a
# model, and as it differs in each request, no cached prefix could be reused.
_FOR_SERVERS = re.compile(r"\Ax-anthropic-billing-header:(?: *[\w-]+=[^;\n]*;)*\n?")


class Thinking(OpenBody):
    """A thought of an earlier answer. signature: as that answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(OpenBody):
    """A thought that only its own maker can read."""

    type: Literal["redacted_thinking"]


class ToolUse(OpenBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolReference(OpenBody):
    """Names a tool that a search found. Here all tools are in the prompt anyway."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResult(OpenBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextPart | ToolReference, Field(discriminator="type")]] | None = (
        None
    )
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """What the model reads. Templates have no field for an error, so the text says so."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = (b.text if isinstance(b, TextPart) else b.tool_name for b in content)
            content = "\n".join(texts)
        return f"Error: {content}" if self.is_error else content


Block = Annotated[
    TextPart | Thinking | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")
]


class Message(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)] if self.content else []
        return self.content


def conversation(system: Content | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template, with a turn's tool results before its user text."""
    texts = [system] if isinstance(system, str) else [joined([part]) for part in system or ()]
    brief = "\n".join(text for text in (_FOR_SERVERS.sub("", each) for each in texts) if text)
    spoken = [message_of("system", brief)] if brief else []
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for message in messages:
        blocks = message.blocks
        told = [block.text for block in blocks if isinstance(block, TextPart)]
        if message.role == "assistant":
            used = [block for block in blocks if isinstance(block, ToolUse)]
            thinking = [block for block in blocks if isinstance(block, Thinking)]
            thoughts = [each.thinking or unsealed(each.signature) for each in thinking]
            calls = [call_of(each.id, each.name, each.input) for each in used]
            spoken.append(answer_of(told, thoughts, calls))
            names |= {each.id: each.name for each in used}
            continue
        results = [block for block in blocks if isinstance(block, ToolResult)]
        for result in results:
            id = result.tool_use_id
            spoken.append(message_of("tool", result.text, name=names.get(id), tool_call_id=id))
        if told or not results:
            spoken.append(message_of(message.role, "\n".join(told)))
    return spoken


_EFFORTS = {"xhigh": "high", "max": "high"}  # levels that no template knows


class Tool(OpenBody):
    type: Literal["custom"] | None = None  # other types run on Anthropic's servers
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        others = {"description": self.description, "strict": self.strict}
        return tool_of(self.name, **others, parameters=self.input_schema)


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    """budget_tokens: most tokens of a thought. display: whether answers include their thoughts."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountBody(AnswerBody):
    """Asks for the number of tokens in a request. Fields for answering are accepted, too."""

    messages: Annotated[list[Message], Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    chat_template_kwargs: JsonObject | None = None
    n: Literal[1] | None = None
    n_probs: Literal[0] | None = None

    def request(self) -> Request:
        messages, choice = self.messages, self.tool_choice or ToolChoice(type="auto")
        goes_on = messages[-1].role == "assistant"
        if goes_on and not messages[-1].blocks:  # an answer that has not begun
            goes_on, messages = False, messages[:-1]
        if not messages:
            raise refused("messages", "says nothing: send a message of the user.")
        alone, forced = choice.disable_parallel_tool_use, choice.type in ("any", "tool")
        return replace(
            super().request(),
            messages=conversation(self.system, messages),
            tools=[tool.for_chat() for tool in self.tools or ()],
            tool_choice="none" if choice.type == "none" else "required" if forced else "auto",
            tool_name=choice.name,
            parallel_tool_calls=None if alone is None else not alone,
            thoughts="hidden" if self.thinking and self.thinking.display == "omitted" else "told",
            prompt_options=self._prompt_options(goes_on or None),
        )

    def _prompt_options(self, goes_on: bool | None) -> dict[str, Any]:
        """Thinking is off by default. A model that cannot think may be asked to."""
        given, config = self.chat_template_kwargs or {}, self.output_config or OutputConfig()
        asked = self.thinking or ThinkingOptions(type="disabled")
        effort = config.effort and _EFFORTS.get(config.effort, config.effort)
        return prompt_options(
            given,
            None if "enable_thinking" in given else asked.type != "disabled",
            None if "reasoning_effort" in given else effort,
            asked.budget_tokens,
            continue_final_message=goes_on,
        )

    def forms(self) -> dict[str, Grammar | None]:
        config = self.output_config or OutputConfig()
        named = {"output_config.format": config.format, "output_format": self.output_format}
        return {name: grammar_of(each) for name, each in named.items()} | super().forms()


class MessagesBody(CountBody):
    """Asks for the assistant's next message."""

    max_tokens: Count


class MessageReply(PartsReply):
    """The assistant's next message as blocks. A hidden thought is a signature without text."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._content: list[dict[str, Any]] = []  # complete blocks, and the open one
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Stats(prompt_n=len(work.prompts[0]))),
        }

    def opening(self) -> str:
        return _event("message_start", message=self._message) + _event("ping")

    def waiting(self) -> str:
        return _event("ping")

    def end(self, round_: Round, result: GenerationResult) -> str:
        told = self.end_part()
        reason, stop = self._reason(result)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = _usage(result.stats, result.reasoning_n)
        self._message |= {**delta, "usage": usage}
        return told + _event("message_delta", delta=delta, usage=usage)

    def closing(self) -> str:
        return _event("message_stop")

    def failure(self, error: ApiError) -> str:
        return server_event(error.document(MESSAGES), "error")

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self._message

    def _reason(self, result: GenerationResult) -> tuple[str, str | None]:
        """Return why the message ended, and the stop string that ended it."""
        if result.finish_reason is FinishReason.STOP:
            if result.stop is not None:
                return "stop_sequence", result.stop
            has_called = any(block["type"] == "tool_use" for block in self._content)
            return ("tool_use" if has_called else "end_turn"), None
        is_full = result.finish_reason is FinishReason.LENGTH
        if is_full and result.stats.predicted_n < (self._request.max_tokens or 0):
            return "model_context_window_exceeded", None
        return "max_tokens", None

    def begin(self, kind: PartKind, call: CallHead | None) -> str:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind is PartKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._content.append(block)
        return self._of_block("start", content_block=block)

    def add(self, text: str) -> str:
        if not text:
            return ""
        if self.open is PartKind.CALL:
            return self._delta("input_json", partial_json=text)
        kind = "text" if self.open is PartKind.TEXT else "thinking"
        if kind == "thinking" and not self._request.tells_thoughts:
            return ""
        self._content[-1][kind] += text
        return self._delta(kind, **{kind: text})

    def close(self) -> str:
        told, block = "", self._content[-1]
        if self.open is PartKind.REASONING:
            # Many clients drop a thought without a signature; it also carries a hidden thought.
            block["signature"] = sealed(self.written)
            told = self._delta("signature", signature=block["signature"])
        elif self.open is PartKind.CALL:
            block["input"] = arguments_of(self.written)
        return told + self._of_block("stop")

    def _delta(self, kind: str, **delta: str) -> str:
        return self._of_block("delta", delta={"type": f"{kind}_delta", **delta})

    def _of_block(self, what: str, **fields: Any) -> str:
        return _event(f"content_block_{what}", index=len(self._content) - 1, **fields)


def _usage(stats: Stats, reasoning_n: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_n - stats.cached_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_n,
        "output_tokens": stats.predicted_n,
        "output_tokens_details": {"thinking_tokens": reasoning_n},
    }


def _event(kind: str, **fields: Any) -> str:
    return server_event({"type": kind, **fields}, kind)


MESSAGES = "/v1/messages"
