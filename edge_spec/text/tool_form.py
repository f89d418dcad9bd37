"""The form in which a model writes calls of tools, and a grammar that holds answers to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.text.chat_template import Tools
from edge_spec.text.grammar import JSON_STYLE, Grammar

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
        self, tools: Tools, *, required: bool, several: bool, text: Mapping[str, Any] | None = None
    ) -> Grammar:
        """Holds an answer to calls of `tools` from where the first one begins; nothing follows the
        last one.

        required: the answer begins with a call; else it is text, or text and then calls.
        several: up to MAX_CALLS. text: a JSON Schema for an answer without a call.
        """
        rules = ["%llguidance {}", *self._calls(several), *self._functions(tools)]
        if required:
            rules += ["start: calls"]
        elif text is not None:
            rules += ["start: calls | text", f"text: %json {_schema(text, lenient=False)}"]
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
            rules += [f"arguments{index}: %json {_schema(_parameters(tool['function']))}"]
        return rules

    def _call(self, function: Mapping[str, Any]) -> str:
        call = {"name": function["name"], self.arguments: function.get("arguments", {})}
        return f"{self.opening}{json.dumps(call, ensure_ascii=False)}{self.closing}"


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of the arguments. Those that it does not name are left out: a small model
    would make up more and more of them."""
    parameters = function.get("parameters") or {"type": "object"}
    closed = {"properties": {}, "additionalProperties": False}
    is_open = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
    return parameters if is_open & parameters.keys() else {**closed, **parameters}


def _schema(schema: Mapping[str, Any], *, lenient: bool = True) -> str:
    """lenient: keywords that llguidance does not know are passed over, not refused: what is in a
    tool's schema is often not the client's to change."""
    return json.dumps({**schema, "x-guidance": {**JSON_STYLE, "lenient": lenient}})


def _quoted(text: str) -> str:
    """Returns a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
