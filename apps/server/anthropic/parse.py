"""Requests of Anthropic's Messages API, read as those of conversations here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from edge_spec.apps.server.fields import (
    HARMLESS,
    LEAVE_OUT,
    Body,
    Count,
    JsonObject,
    OpenBody,
    converted,
    refusal,
    words,
)
from edge_spec.apps.server.messages import MAX_TOOLS, Content, TextPart, ToolName, joined
from edge_spec.apps.server.reply import unsealed
from edge_spec.apps.server.schema import AnswerRequest, ChatRequest, Schema

# What Claude Code tells Anthropic's servers at the beginning of the system's text. It is for no
# model, and other in each request, so that nothing that comes after it would be read once only.
_FOR_SERVERS = re.compile(r"\Ax-anthropic-billing-header:(?: *[\w-]+=[^;\n]*;)*\n?")


class Thinking(OpenBody):
    """What an earlier answer thought. signature: as the answer had it."""

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
    """Names a tool that was searched for. All tools are in the prompt here."""

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
        """Returns what the model reads of it; templates have no other place for an error."""
        content = self.content or ""
        if not isinstance(content, str):
            texts = (b.text if isinstance(b, TextPart) else b.tool_name for b in content)
            content = "\n".join(texts)
        return f"Error: {content}" if self.is_error else content


Block = Annotated[
    TextPart | Thinking | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")
]
_ROLES = {ToolResult: "user", Thinking: "assistant", RedactedThinking: "assistant"}
_ROLES[ToolUse] = "assistant"


class Message(OpenBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

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
    texts = [system] if isinstance(system, str) else [joined([part]) for part in system or ()]
    brief = "\n".join(text for text in (_FOR_SERVERS.sub("", each) for each in texts) if text)
    spoken: list[dict[str, Any]] = [{"role": "system", "content": brief}] if brief else []
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for message in messages:
        told = [block.text for block in message.blocks if isinstance(block, TextPart)]
        if message.role == "assistant":
            spoken.append(_answer(told, message.blocks))
            names |= {each.id: each.name for each in message.blocks if isinstance(each, ToolUse)}
            continue
        results = [block for block in message.blocks if isinstance(block, ToolResult)]
        for result in results:
            id = result.tool_use_id
            called = {"role": "tool", "tool_call_id": id, "name": names.get(id)}
            spoken.append({**called, "content": result.text})
        if told or not results:
            spoken.append({"role": message.role, "content": "\n".join(told)})
    return spoken


def _answer(texts: Sequence[str], blocks: Sequence[Block]) -> dict[str, Any]:
    used = [block for block in blocks if isinstance(block, ToolUse)]
    functions = [(each.id, {"name": each.name, "arguments": each.input}) for each in used]
    calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
    thinking = [block for block in blocks if isinstance(block, Thinking)]
    thoughts = [each.thinking or unsealed(each.signature) for each in thinking]
    return {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        "reasoning_content": "\n\n".join(filter(None, thoughts)) or None,
        "tool_calls": calls or None,
    }


_EFFORTS = {"xhigh": "high", "max": "high"}  # which no template knows


class Tool(OpenBody):
    type: Literal["custom"] | None = None  # the others are of Anthropic's servers and models
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"})
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise refusal("name", "names a tool with the type tool, and with no other")
        return self

    def for_chat(self) -> Any:
        if self.name is None:
            return self.type
        return {"type": "function", "function": {"name": self.name}}


class ThinkingOptions(Body):
    """budget_tokens: at most as many. display: whether an answer tells its thoughts."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(OpenBody):
    type: Literal["json_schema"]
    given: Schema = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


# Who pays, where, and what Anthropic's own prompt cache is told.
_HARMLESS = words(
    """cache_control diagnostics inference_geo speed user_profile_id workspace_id
    anthropic_version anthropic_beta betas context_management"""
)


class CountRequest(AnswerRequest):
    """Asks how many tokens a request has. What `/v1/chat/completions` is asked by other names than
    Anthropic's is understood here, too."""

    harmless = HARMLESS | _HARMLESS
    has_origins = False
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def tells_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def for_chat(self) -> ChatRequest:
        """Returns the same as a request of `/v1/chat/completions`. Raises ApiError."""
        asked = self.given(AnswerRequest)
        format = self.output_format or (self.output_config or OutputConfig()).format
        if format is not None:
            asked["response_format"] = {"type": "json_schema", "schema": format.given}
        if self.tool_choice is not None:
            asked["tool_choice"] = self.tool_choice.for_chat()
            if self.tool_choice.disable_parallel_tool_use is not None:
                asked["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        goes_on, last = self.messages[-1].role == "assistant", len(self.messages)
        if goes_on and not self.messages[-1].blocks:  # an answer that has not begun
            goes_on, last = False, last - 1
        asked |= {
            **self._thinks(),
            "messages": conversation(self.system, self.messages[:last]),
            "tools": [tool.for_chat() for tool in self.tools or ()] or None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": goes_on or None,
        }
        return converted(ChatRequest, asked)

    def _thinks(self) -> dict[str, Any]:
        """Who does not ask for thoughts expects the first block to be a text. A budget and an
        effort are the most that is wanted: a model without thoughts is asked, too."""
        thinking = self.thinking or ThinkingOptions(type="disabled")
        effort = (self.output_config or OutputConfig()).effort
        asked = {
            "enable_thinking": thinking.type != "disabled",
            "reasoning_budget": thinking.budget_tokens,
            "reasoning_effort": effort and _EFFORTS.get(effort, effort),
        }
        given = self.chat_template_kwargs or {}
        return {name: value for name, value in asked.items() if name not in given}

    @model_validator(mode="after")
    def _fits(self) -> CountRequest:
        for name, asks in (("n", self.num_choices > 1), ("n_probs", self.n_probs)):
            if asks:
                raise refusal(name, f"asks for what has no place in a message: {LEAVE_OUT}")
        last = self.messages[-1]
        if last.role == "assistant" and last.blocks and not isinstance(last.blocks[-1], TextPart):
            told = "an answer goes on with a text, or comes after a message of the user"
            raise refusal("messages", f"ends with {last.blocks[-1].type}: {told}")
        if last.role == "assistant" and len(self.messages) == 1 and not last.blocks:
            raise refusal("messages", "says nothing: send a message of the user")
        return self


class MessagesRequest(CountRequest):
    """Asks for the assistant's next message."""

    max_tokens: Count
