"""The form in which a model writes calls of tools, a grammar that holds answers to it, and what a
chat template makes of messages and tools, found out by rendering small ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from edge_spec.errors import EdgeSpecError
from edge_spec.text.grammar import JSON_STYLE, Grammar, tell_passed_over
from edge_spec.text.plain_messages import Message, Tools
from edge_spec.text.template_probes import (
    ARGUMENTS,
    ASSISTANT,
    CALLED,
    LISTED,
    RESULT,
    TOOLS,
    USER,
    object_with,
    probe_call,
    probe_message,
    probe_of,
    shape_of,
    words_of,
)

if TYPE_CHECKING:
    from edge_spec.text.json_schema import HeldSchema

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
_MAX_SHAPES = 1000  # of conversations, which are remembered
Render = Callable[[Sequence[Message], Tools], str]


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
    if isinstance(parameters, Mapping) and all(parameters.get(each) is None for each in _NAMING):
        parameters = {**parameters, "properties": {}}
    source = json.dumps(parameters)
    return _held_arguments(source, function["name"], function.get("strict") is True).schema


@lru_cache(maxsize=256)
def _held_arguments(source: str, name: str, is_strict: bool) -> HeldSchema:
    from edge_spec.text.json_schema import held_schema

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

    silences: contents of a message that only calls; None: it has none. takes_mappings, takes_texts:
    arguments as an object, and as JSON text of one. takes_several: calls in one message.
    """

    form: ToolForm
    silences: tuple[str | None, ...]
    takes_mappings: bool
    takes_texts: bool
    takes_several: bool


class TemplateTraits:
    """Each is found out when it is asked for first. Any thread may ask."""

    def __init__(self, render: Render) -> None:
        """render: raises EdgeSpecError for what the template refuses."""
        self._render = render
        self._taken: dict[Hashable, bool] = {}  # by the shape of a conversation

    @cached_property
    def takes_system(self) -> bool:
        """Says whether a first message of the system is shown."""
        return self.takes([probe_message("system", ""), probe_message("user", "")])

    def takes(self, messages: Sequence[Message]) -> bool:
        """Says whether all of a conversation of this shape is shown, wherever its speakers and
        calls stand."""
        shape = tuple(map(shape_of, messages))
        taken = self._taken.get(shape)
        if taken is None:
            if len(self._taken) >= _MAX_SHAPES:
                self._taken.clear()
            taken = self._taken[shape] = self._shows(
                [probe_of(message, place) for place, message in enumerate(messages)]
            )
        return taken

    @cached_property
    def native_tools(self) -> NativeTools | None:
        """Returns None if it knows no tools, loses what they return, or has calls written in a form
        that `ToolForm` is not."""
        found = {}
        for silence, is_text in product(("", None), (False, True)):
            text = self._tried([probe_call(silence, is_text), probe_message("tool", RESULT)])
            if text is not None and LISTED in text and RESULT in text:
                form = self._form(text)
                if form is not None:
                    found[silence, is_text] = form
        if not found:
            return None
        (silence, is_text), form = next(iter(found.items()))
        several = self._tried([probe_call(silence, is_text, 2), *[probe_message("tool", "")] * 2])
        return NativeTools(
            form,
            silences=tuple(dict.fromkeys(silence for silence, _ in found)),
            takes_mappings=any(not is_text for _, is_text in found),
            takes_texts=any(is_text for _, is_text in found),
            takes_several=several is not None and several.count(CALLED) == 2,
        )

    def _form(self, text: str) -> ToolForm | None:
        """Finds the form of the call in a rendered conversation."""
        start, end, call = object_with(CALLED, text)
        names = list(call)
        if names not in (["name", "arguments"], ["name", "parameters"]):
            return None
        if call["name"] != CALLED or call[names[1]] != ARGUMENTS:
            return None
        before, after = text[:start], text[end:]
        if before.rstrip().endswith(TAG) and after.lstrip().startswith(END_TAG):
            opened = before[len(before.rstrip()) :]
            closed = after[: len(after) - len(after.lstrip())]
            return ToolForm(f"{TAG}{opened}", f"{closed}{END_TAG}", names[1])
        plain = self._tried([probe_message("assistant", ASSISTANT)])
        is_bare = plain is not None and plain.partition(ASSISTANT)[0] == before
        return ToolForm("", "", names[1]) if is_bare else None

    def _tried(self, answer: Sequence[Message]) -> str | None:
        try:
            return self._render([probe_message("user", USER), *answer], TOOLS)
        except EdgeSpecError:
            return None

    def _shows(self, probes: Sequence[Message]) -> bool:
        try:
            text = self._render(probes, ())
        except EdgeSpecError:
            return False
        return all(word in text for probe in probes for word in words_of(probe))
