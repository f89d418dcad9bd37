"""The requests of Anthropic's Messages API, turned into those of conversations here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from edge_spec.apps.server import other_servers as others
from edge_spec.apps.server.anthropic.blocks import Message, conversation
from edge_spec.apps.server.body import Body, Count, JsonObject, OpenBody
from edge_spec.apps.server.field_names import LEAVE_OUT, OtherNames, readable, refusal
from edge_spec.apps.server.forms import Schema
from edge_spec.apps.server.messages import MAX_TOOLS, Content, TextPart, ToolName
from edge_spec.apps.server.refusals import converted
from edge_spec.apps.server.schema import AnswerRequest, ChatRequest

_EFFORTS = {"xhigh": "high", "max": "high"}  # which no template knows


class Tool(OpenBody):
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_of_the_client(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise refusal(
                "type",
                f"is {readable(str(kind)[:40])}, which Anthropic's servers or models know: send a "
                "tool with a name, a description and an input_schema",
            )
        return given

    def for_chat(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.input_schema,
                "strict": self.strict,
            },
        }


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


class Thinking(Body):
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


class CountRequest(AnswerRequest):
    """Asks how many tokens a request has. What `/v1/chat/completions` is asked by other names than
    Anthropic's is understood here, too."""

    other_names = OtherNames(
        also=others.ANSWER_ALSO,
        harmless=others.MESSAGES_HARMLESS,
        off=others.MESSAGES_OFF,
    )
    has_origins = False
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
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
        thinking = self.thinking or Thinking(type="disabled")
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
            raise refusal(
                "messages",
                f"ends with {last.blocks[-1].type}: an answer goes on with a text, or comes after "
                "a message of the user",
            )
        if last.role == "assistant" and len(self.messages) == 1 and not last.blocks:
            raise refusal("messages", "says nothing: send a message of the user")
        return self


class MessagesRequest(CountRequest):
    """Asks for the assistant's next message."""

    max_tokens: Count
