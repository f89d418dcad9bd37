"""The form in which a model writes calls of tools, a grammar that holds answers to it, and what a
chat template makes of messages and tools, found out by rendering small ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import Message, Tools
from edge_spec.text.grammar import JSON_STYLE, Grammar, tell_passed_over
from edge_spec.text.json_schema import HeldSchema, held_schema

TAG, END_TAG = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # of one answer: a small model may repeat a call without end
_ANYTHING = "/(.|\\n)*/"
_DESCRIPTION = """\
You may call these functions. Each is described in JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON between tags:
{call}
Several calls follow one another. What they return comes next, between <tool_response> tags. \
If no function helps, answer without a call."""
# With one of them, a schema says what members an object may have.
_NAMING = (
    *("$ref", "allOf", "anyOf", "const", "enum", "if", "oneOf"),
    *("additionalProperties", "patternProperties", "properties", "propertyNames"),
)
Render = Callable[[Sequence[Message], Tools], str]

# Words that no template has of its own.
_USER, _SYSTEM, _MORE, _LATER = "probe-user", "probe-system", "probe-more", "probe-later"
_ASSISTANT, _LISTED, _CALLED = "probe-assistant", "probe_listed", "probe_called"
_RESULT, _ARGUMENTS = "probe-result", {"probe_argument": "probe-value"}
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": _LISTED,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class ToolForm:
    """A call is `opening`, a JSON object of a name and arguments, and `closing`.

    opening: begins with TAG; "" where the object is the whole answer. arguments: the name of that
    member.
    """

    opening: str = f"{TAG}\n"
    closing: str = f"\n{END_TAG}"
    arguments: str = "arguments"

    @property
    def marker(self) -> str:
        """Returns what a call begins with, and no other text does."""
        return TAG if self.opening else '{"name": "'

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of calls as messages have them."""
        return "\n".join(self._call(call["function"]) for call in calls)

    def described(self, tools: Tools) -> str:
        """Returns what a system message says of tools where the chat template knows none."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self._call({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}})
        return _DESCRIPTION.format(tools=listed, call=example)

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        """Holds an answer to calls of `tools` from where the first one begins; nothing follows the
        last one.

        required: the answer begins with a call; else it is text, or text and then calls.
        several: up to MAX_CALLS. text: of a JSON schema, for an answer without a call. Raises
        UsageError for a schema that is none, or that no call fits.
        """
        rules = ["%llguidance {}", *self._calls(several), *self._functions(tools)]
        if required:
            rules += ["start: calls"]
        elif text is not None:
            rules += ["start: calls | text", f"text: %json {_styled(text.held().schema)}"]
        elif self.opening:
            rules += ["start: TEXT | opened rest", f"TEXT: {_ANYTHING}"]
            rules += [f"opened[lazy]: {_ANYTHING} {_quoted(TAG)}"]
        else:
            begun = re.escape(self.marker).replace("/", r"\/")
            rules += ["start: TEXT | calls", f"TEXT: {_ANYTHING} & ~/{begun}(.|\\n)*/"]
        return Grammar.lark("\n".join(rules))

    def _calls(self, several: bool) -> list[str]:
        if not self.opening:
            return ["calls: call"]
        rest = f"{_quoted(self.opening.removeprefix(TAG))} call {_quoted(self.closing)}"
        if several:
            again = f"{_quoted(chr(10) + self.opening)} call {_quoted(self.closing)}"
            rest += f" ({again}){{0,{MAX_CALLS - 1}}}"
        return [f"calls: {_quoted(TAG)} rest", f"rest: {rest}"]

    def _functions(self, tools: Tools) -> list[str]:
        rules = ["call: " + " | ".join(f"call{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            name = json.dumps(tool["function"]["name"])
            head = _quoted(f'{{"name": {name}, "{self.arguments}": ')
            rules += [f'call{index}: {head} arguments{index} "}}"']
            rules += [f"arguments{index}: %json {_styled(_arguments(tool['function']))}"]
        return rules

    def _call(self, function: Mapping[str, Any]) -> str:
        call = {"name": function["name"], self.arguments: function.get("arguments", {})}
        return f"{self.opening}{json.dumps(call, ensure_ascii=False)}{self.closing}"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the arguments, which are an object whatever the function's schema says.
    Those that it does not name are left out: a small model would make up more and more of them.

    What is in a tool's schema is often not the client's to change: keywords that cannot be held are
    passed over, unless the tool says strict: true."""
    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    if isinstance(parameters, Mapping) and parameters.keys().isdisjoint(_NAMING):
        parameters = {**parameters, "properties": {}}
    source = json.dumps(parameters)
    return _held_arguments(source, function["name"], function.get("strict") is True).schema


@lru_cache(maxsize=256)
def _held_arguments(source: str, name: str, is_strict: bool) -> HeldSchema:
    place = f"the parameters of {name}"
    held = held_schema(json.loads(source), is_strict=is_strict, is_object=True, name=place)
    tell_passed_over(place, held)
    return held


def _styled(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def _quoted(text: str) -> str:
    """Returns a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class NativeTools:
    """Says how a template that knows tools wants calls in messages.

    silence: the content of a message that only calls. is_text: arguments are JSON text, not a
    mapping. takes_several: calls in one message.
    """

    form: ToolForm
    silence: str | None
    is_text: bool
    takes_several: bool


class TemplateTraits:
    """Each is found out when it is asked for first. Any thread may ask."""

    def __init__(self, render: Render) -> None:
        """render: raises EdgeSpecError for what the template refuses."""
        self._render = render

    @cached_property
    def takes_system(self) -> bool:
        """Says whether a first message of the system is shown."""
        return self._shows(_message("system", _SYSTEM), _message("user", _USER))

    @cached_property
    def takes_more_systems(self) -> bool:
        """Says whether messages of the system are shown after the first, wherever they stand."""
        return self._shows(
            _message("system", _SYSTEM),
            _message("system", _MORE),
            _message("user", _USER),
            _message("assistant", _ASSISTANT),
            _message("system", _LATER),
            _message("user", "probe-next"),
        )

    @cached_property
    def takes_repeats(self) -> bool:
        """Says whether user or assistant may speak twice in turn."""
        return self._shows(
            _message("user", _USER),
            _message("user", _MORE),
            _message("assistant", _ASSISTANT),
            _message("assistant", _LATER),
            _message("user", "probe-next"),
        )

    @cached_property
    def native_tools(self) -> NativeTools | None:
        """Returns None if it knows no tools, loses what they return, or has calls written in a form
        that `ToolForm` is not."""
        for silence, is_text in product(("", None), (False, True)):
            text = self._tried([_call(silence, is_text), _message("tool", _RESULT)])
            if text is None or _LISTED not in text or _RESULT not in text:
                continue
            form = self._form(text)
            if form is not None:
                several = self._tried([_call(silence, is_text, 2), *[_message("tool", "")] * 2])
                shown = several is not None and several.count(_CALLED) == 2
                return NativeTools(form, silence, is_text, takes_several=shown)
        return None

    def _form(self, text: str) -> ToolForm | None:
        """Finds the form of the call in a rendered conversation."""
        start, end, call = _object_with(_CALLED, text)
        names = list(call)
        if names not in (["name", "arguments"], ["name", "parameters"]):
            return None
        if call["name"] != _CALLED or call[names[1]] != _ARGUMENTS:
            return None
        before, after = text[:start], text[end:]
        if before.rstrip().endswith(TAG) and after.lstrip().startswith(END_TAG):
            opened = before[len(before.rstrip()) :]
            closed = after[: len(after) - len(after.lstrip())]
            return ToolForm(f"{TAG}{opened}", f"{closed}{END_TAG}", names[1])
        plain = self._tried([_message("assistant", _ASSISTANT)])
        is_bare = plain is not None and plain.partition(_ASSISTANT)[0] == before
        return ToolForm("", "", names[1]) if is_bare else None

    def _tried(self, answer: Sequence[Message]) -> str | None:
        try:
            return self._render([_message("user", _USER), *answer], _TOOLS)
        except EdgeSpecError:
            return None

    def _shows(self, *messages: Message) -> bool:
        try:
            text = self._render(messages, ())
        except EdgeSpecError:
            return False
        return all(message["content"] in text for message in messages)


def _message(role: str, content: str) -> Message:
    named = {"name": _CALLED, "tool_call_id": "probe0001"} if role == "tool" else {}
    return {"role": role, "content": content, **named}


def _call(silence: str | None, is_text: bool, times: int = 1) -> Message:
    arguments = json.dumps(_ARGUMENTS) if is_text else _ARGUMENTS
    function = {"name": _CALLED, "arguments": arguments}
    calls = [
        {"id": f"probe000{index + 1}", "type": "function", "function": function}
        for index in range(times)
    ]
    return {"role": "assistant", "content": silence, "tool_calls": calls}


def _object_with(word: str, text: str) -> tuple[int, int, Mapping[str, Any]]:
    """The innermost JSON object in `text` around the word: where it is, and what; (0, 0, {})
    without one."""
    place = text.find(f'"{word}"')
    start = text.rfind("{", 0, max(place, 0))
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, 0
        if end > place:
            return start, end, value
        start = text.rfind("{", 0, start)
    return 0, 0, {}
