"""Adapt messages and tools to a chat template by rendering probes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.plain_messages import (
    PROBE_ARGUMENTS,
    Message,
    Tools,
    joined,
    meant_arguments,
    with_call_arguments,
)

if TYPE_CHECKING:
    from edge_spec.text.tools.detection import NativeTools


ANSWER, FOLLOW_UP = "First answer.", "Second question."
_CONVERSATION: Sequence[Message] = (
    {"role": "user", "content": "First question."},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": FOLLOW_UP},
)


class TemplateTraits:
    """Traits of one template, found on first use. Any thread may ask."""

    def __init__(
        self, render: Callable[..., str], tokens: Callable[[], Collection[str]] = tuple
    ) -> None:
        """render: raises EdgeSpecError if the template refuses. tokens: the model's added
        tokens."""
        self._render = render
        self._tokens = tokens

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a leading system message."""
        return self.takes([{"role": role, "content": ""} for role in ("system", "user")])

    def takes(self, messages: Sequence[Message]) -> bool:
        """Return True if the template shows all of a conversation of this shape. Many drop text
        next to calls."""
        probes, words = [], []
        for place, message in enumerate(messages):
            probe = {**message}
            if calls := message.get("tool_calls"):
                names = [f"probe_call_{place}_{index}_" for index in range(len(calls))]
                probe["tool_calls"] = list(map(_probe_call, calls, names))
                words += names
            if message.get("content") or not calls:
                probe["content"] = f"probe-content-{place}."
            if not calls:
                words.append(probe["content"])
            probes.append(probe)
        text = self.shown(probes)
        return all(word in text for word in words)

    @cached_property
    def conversation(self) -> str:
        """A prompt with a question, `ANSWER` and `FOLLOW_UP`; "" if the template refuses."""
        return self.shown(_CONVERSATION)

    def shown(self, messages: Sequence[Message], tools: Tools = (), **options: Any) -> str:
        """Return the prompt; "" if the template refuses."""
        try:
            return self._render(messages, tools, **options)
        except EdgeSpecError:
            return ""

    @cached_property
    def native_tools(self) -> NativeTools | None:
        """None if the template shows no calls and describes no known format."""
        from edge_spec.text.tools.detection import native_tools

        return native_tools(self.shown, self._tokens)


def _probe_call(call: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    is_text = isinstance(call["function"].get("arguments"), str)
    arguments = json.dumps(PROBE_ARGUMENTS) if is_text else PROBE_ARGUMENTS
    return {**call, "function": {"name": name, "arguments": arguments}}


def fitted(
    messages: Sequence[Message], tools: Tools, traits: TemplateTraits
) -> tuple[Sequence[Message], Tools]:
    """Return messages and tools that the template can render. What it takes stays unchanged, so the
    prompt is transformers'.

    Without tool support, a system message describes tools, and calls and results become text.
    Consecutive messages of a speaker are merged if speakers must take turns. System messages that
    are refused or dropped join the first one, or the next user message. Raises UsageError for tools
    and calls not in OpenAI's form.
    """
    if tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
        from edge_spec.text.tools.detection import SPELLED, native_history

        messages, native = with_arguments(messages), traits.native_tools
        if native is None and (tools or not traits.takes(messages)):
            native = SPELLED
        if native is not None:
            if not native.shows_tools:
                _check("tools", tools)
            messages, tools = native_history(messages, tools, native)
    return _arranged(messages, traits), tools


def with_arguments(messages: Sequence[Message]) -> Sequence[Message]:
    """Parse the arguments of calls into objects. Raises UsageError for calls not in OpenAI's
    form."""
    for message in messages:
        _check("a message's tool_calls", message.get("tool_calls") or ())
    return [
        {**each, "tool_calls": list(map(_as_mapping, each["tool_calls"]))}
        if each.get("tool_calls")
        else each
        for each in messages
    ]


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


def _as_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        meant = meant_arguments(call["function"].get("arguments", {}))
    except ValueError:
        return call
    return with_call_arguments(call, meant) if isinstance(meant, dict) else call


def _arranged(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    systems = [index for index, each in enumerate(messages) if each["role"] == "system"]
    is_usual = not systems or (systems == [0] and traits.takes_system)
    if (is_usual and not any(_in_a_row(messages))) or traits.takes(messages):
        return messages
    candidates = [_turns(messages)]
    if systems:
        joined_systems = _systems(messages, traits)
        candidates += [joined_systems, _turns(joined_systems)]
    return next((each for each in candidates[:-1] if traits.takes(each)), candidates[-1])


def _systems(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    """Join leading system messages; turn the others into user messages."""
    num_first = 0
    if traits.takes_system:
        others = (n for n, each in enumerate(messages) if each["role"] != "system")
        num_first = next(others, len(messages))
    rest = [
        {**each, "role": "user"} if each["role"] == "system" else each
        for each in messages[num_first:]
    ]
    return [reduce(joined, messages[:num_first]), *rest] if num_first else rest


def _in_a_row(messages: Sequence[Message]) -> list[bool]:
    """Return for each message but the first whether the user or assistant continues speaking."""
    return [
        before["role"] == after["role"] and after["role"] in ("user", "assistant")
        for before, after in pairwise(messages)
    ]


def _turns(messages: Sequence[Message]) -> Sequence[Message]:
    turns = [messages[0]]
    for message, goes_on in zip(messages[1:], _in_a_row(messages), strict=True):
        turns = [*turns[:-1], joined(turns[-1], message)] if goes_on else [*turns, message]
    return turns
