"""Joins a model's tokenizer, chat template and end tokens: what stands between text and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, Unpack

from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.chat_template import (
    ChatTemplate,
    Message,
    PromptOptions,
    Tools,
    check_messages,
)
from edge_spec.text.control_tokens import ControlTokens, literals_of
from edge_spec.text.template_traits import NativeTools, TemplateTraits, ToolForm

_LAST = "probe-last"
_PROBE: Sequence[Message] = (
    {"role": "user", "content": "probe-user"},
    {"role": "assistant", "content": "probe-assistant"},
    {"role": "user", "content": _LAST},
)
_GAP = "\n\n"  # between the contents of messages that become one


@dataclass(frozen=True)
class ChatFormat:
    """Turns text and messages into one model's tokens, and its tokens into text."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling: RecommendedSampling = NOTHING_STATED
    parse_special: bool = False  # whether control tokens are read in messages, too

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """The tokens that ask for the assistant's next message; a string is one of the user.

        Messages and tools are fitted to the template (`fitted`). Control tokens are the template's
        alone, unless `parse_special`: what is given stays text. options: `PromptOptions`. Raises
        UsageError for malformed messages and options, UnsupportedModelError for messages that the
        template refuses all the same.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.parse_special:
            return self.tokenizer.encode(self.rendered(messages, tools, **options))
        self.template()
        check_messages(messages)

        def render(messages: Sequence[Message], tools: Tools, options: PromptOptions) -> str:
            return self.rendered(messages, tools, **options)

        try:
            return self.control_tokens.encode(render, messages, tools, options)
        except RecursionError:
            raise _too_deep() from None

    def rendered(
        self, messages: Sequence[Message], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> str:
        """The text of these tokens. Raises as `chat_prompt` does."""
        template = self.template()
        check_messages(messages)
        try:
            messages, tools = fitted(messages, tools, self.traits)
        except RecursionError:
            raise _too_deep() from None
        return template.render(messages, tools, **options)

    def tool_form(self) -> ToolForm:
        """Returns the form in which the model calls tools. Raises UnsupportedModelError as
        `template` does."""
        native = self.traits.native_tools
        return ToolForm() if native is None else native.form

    @property
    def knows_tools(self) -> bool:
        """Says whether the chat template does. Raises UnsupportedModelError as `template` does."""
        return self.traits.native_tools is not None

    @cached_property
    def traits(self) -> TemplateTraits:
        """Returns what the chat template takes. Raises as `template` does."""
        return TemplateTraits(self.template().render)

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Returns the names that the chat template reads. Raises as `template` does."""
        return self.template().variables()

    def prompt_of(self, text: str) -> list[int]:
        """The tokens that ask for an answer to `text`, or, where the model has no chat template,
        those of the text itself, to be continued."""
        return self.tokenizer.encode(text) if self.chat_template is None else self.chat_prompt(text)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Raises UnsupportedModelError as `template` does."""
        template, source = self.template(), self.chat_template or ""

        def around() -> str:
            try:
                return template.render(_PROBE).partition(_LAST)[0]
            except EdgeSpecError:  # it takes other conversations
                return ""

        ends = {*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))}
        return ControlTokens(self.tokenizer, literals_of(source), ends, around)

    def template(self) -> ChatTemplate:
        """Raises UnsupportedModelError where there is none, or none that compiles."""
        names = [
            "" if token is None else self.tokenizer.token_text(token)
            for token in (self.bos_id, next(iter(self.eos_ids), None))
        ]
        return ChatTemplate(self.chat_template, *names)


def fitted(
    messages: Sequence[Message], tools: Tools, traits: TemplateTraits
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render. What the template takes stays as it is.

    Tools that it does not know are described in a message of the system, calls and their results
    become text; messages of the system that it refuses or loses join the first one, or the user's
    next; messages in a row of one speaker become one where speakers have to take turns. Raises
    UsageError for tools and calls that are not as OpenAI has them.
    """
    if tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
        for message in messages:
            _check("a message's tool_calls", message.get("tool_calls") or ())
        native = traits.native_tools
        if native is None:
            _check("tools", tools)
            form = ToolForm()
            messages, tools = _described([_spelled(each, form) for each in messages], tools), ()
        else:
            messages = [_native(each, native) for each in messages]
    messages = _systems(messages, traits)
    return _turns(messages, traits), tools


def _too_deep() -> UsageError:
    return UsageError(
        "the messages or tools are nested too deeply", remedy="Give them fewer levels."
    )


def _check(where: str, functions: Any) -> None:
    try:
        is_named = all(isinstance(each["function"]["name"], str) for each in functions)
    except (LookupError, TypeError):
        is_named = False
    if not is_named:
        raise UsageError(
            f"{where} has an entry without a function's name",
            remedy='An entry is {"type": "function", "function": {"name": "...", ...}}.',
        )


def _spelled(message: Message, form: ToolForm) -> Message:
    """The message without calls and results: both are text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message.get("content") or "", form.written(calls)]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(part for part in parts if part)}


def _described(messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    if not tools:
        return messages
    described: Message = {"role": "system", "content": ToolForm().described(tools)}
    if messages and messages[0]["role"] == "system":
        return [_joined(messages[0], described), *messages[1:]]
    return [described, *messages]


def _native(message: Message, native: NativeTools) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if len(calls) > 1 and not native.takes_several:
        return _spelled(message, native.form)
    calls = [{**call, "function": _arguments(call["function"], native.is_text)} for call in calls]
    return {**message, "content": message.get("content") or native.silence, "tool_calls": calls}


def _arguments(function: Mapping[str, Any], is_text: bool) -> Mapping[str, Any]:
    arguments = function.get("arguments", {})
    if is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _systems(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    systems = [index for index, each in enumerate(messages) if each["role"] == "system"]
    if not systems or (traits.takes_system and (systems == [0] or traits.takes_more_systems)):
        return messages
    num_first = 0
    if traits.takes_system:
        others = (n for n, each in enumerate(messages) if each["role"] != "system")
        num_first = next(others, len(messages))
    rest = [
        {**each, "role": "user"} if each["role"] == "system" else each
        for each in messages[num_first:]
    ]
    return [reduce(_joined, messages[:num_first]), *rest] if num_first else rest


def _turns(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    in_a_row = [
        before["role"] == after["role"] and after["role"] in ("user", "assistant")
        for before, after in pairwise(messages)
    ]
    if not any(in_a_row) or traits.takes_repeats:
        return messages
    turns = [messages[0]]
    for message, goes_on in zip(messages[1:], in_a_row, strict=True):
        turns = [*turns[:-1], _joined(turns[-1], message)] if goes_on else [*turns, message]
    return turns


def _joined(message: Message, other: Message) -> Message:
    contents = [each["content"] for each in (message, other) if each.get("content")]
    joined: dict[str, Any] = {**message, **other, "content": _GAP.join(contents)}
    calls = [*(message.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return {**joined, "tool_calls": calls} if calls else joined
