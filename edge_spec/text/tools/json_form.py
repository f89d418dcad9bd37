"""Forms in which the arguments of a call are a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools import untagged
from edge_spec.text.tools.arguments import arguments_schema, in_style
from edge_spec.text.tools.json_reader import JsonReader
from edge_spec.text.tools.json_shape import JsonShape
from edge_spec.text.tools.literals import Slot
from edge_spec.text.tools.part_list import IdStyle
from edge_spec.text.tools.value_rules import ANYTHING, literal, regex_of

MAX_CALLS = 16  # of one answer: a small model may repeat a call without end


@dataclass(frozen=True)
class JsonForm(JsonShape):
    """Calls have arguments that are a JSON object."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker,)

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        between = self.closing + "\n" + self.opening if self.between is None else self.between
        functions = [self._call(index, call) for index, call in enumerate(calls)]
        return f"{self.opening}{between.join(functions)}{self.closing}"

    def _call(self, index: int, call: Mapping[str, Any]) -> str:
        function = call["function"]
        given = function.get("arguments", {})
        values = {
            Slot.NAME: function["name"],
            Slot.ARGUMENTS: given if isinstance(given, str) else _json(given),
            Slot.ID: call.get("id") or self.ids.made(function["name"], index),
            Slot.INDEX: str(self.first_index + index),
        }
        return "".join(each if isinstance(each, str) else values[each] for each in self.call)

    def reader(self, tools: Tools = ()) -> JsonReader:
        return JsonReader(self, {tool["function"]["name"] for tool in tools})

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        rules = ["%llguidance {}", *self._calls(several), *self._functions(tools)]
        if required:
            rules += ["start: calls"]
        elif text is not None:
            rules += ["start: calls | text", f"text: %json {in_style(text.held().schema)}"]
        else:
            rules += self._answers([tool["function"]["name"] for tool in tools], several)
        return Grammar.lark("\n".join(rules))

    def _answers(self, names: Sequence[str], several: bool) -> list[str]:
        """Returns rules of text, or of text and then calls, or of calls as they are read where
        their tags are missing."""
        rules = [f"TEXT: {ANYTHING}"]
        kinds = ["TEXT", "calls" if self.is_bare else "opened rest"]
        if not self.is_bare:
            rules.append(f"opened[lazy]: TEXT {literal(self.marker)}")
        if self.is_named:
            kinds.append("untagged")
            rules += self._untagged(names, several)
        return [f"start: {' | '.join(kinds)}", *rules]

    def _untagged(self, names: Sequence[str], several: bool) -> Iterator[str]:
        """Yields rules of one call, as models repeat it, unless the form itself has no tags. The
        name tells it from other text."""
        own_tag = "" if self.is_bare else self.marker
        listed = list(map(regex_of, names))
        other = "OTHER" if self.is_bare else "OTHER | reopened rest"
        if self.is_bare and several and self.between is not None:
            more = f"({literal(self.between)} call){{0,{MAX_CALLS - 2}}} {literal(self.closing)}"
            other += f" | named {literal('}' + self.between)} call {more}"
        yield f"untagged: head (named END | {other})"
        yield f"head[lazy]: /{untagged.head_pattern(own_tag)}/"
        yield f"END: /{untagged.END_PATTERN}/"
        yield f"OTHER: {ANYTHING} & ~/({'|'.join(listed)}){untagged.ARGUMENTS_PATTERN}(.|\\n)*/"
        if not self.is_bare:
            yield f"reopened[lazy]: OTHER {literal(self.marker)}"
        yield "named: " + " | ".join(f"NAMED{n} arguments{n}" for n in range(len(names)))
        for index, name in enumerate(listed):
            yield f"NAMED{index}: /{name}{untagged.ARGUMENTS_PATTERN}/"

    def _calls(self, several: bool) -> list[str]:
        marker = "" if self.is_bare else self.marker
        rest = f"{literal(self.opening.removeprefix(marker))} call"
        if several and self.between is not None:
            rest += f" ({literal(self.between)} call){{0,{MAX_CALLS - 1}}}"
        rest += f" {literal(self.closing)}"
        return [f"calls: {literal(marker)} rest", f"rest: {rest}"]

    def _functions(self, tools: Tools) -> list[str]:
        rules = ["call: " + " | ".join(f"call{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            function = tool["function"]
            rules += [f"call{index}: " + " ".join(self._parts(function["name"], index))]
            rules += [f"arguments{index}: %json {in_style(arguments_schema(function))}"]
        return rules

    def _parts(self, name: str, index: int) -> Iterator[str]:
        """Yields what a call of the function is made of, as Lark has it."""
        text = ""
        slots = {
            Slot.ARGUMENTS: f"arguments{index}",
            Slot.ID: "/[a-zA-Z0-9]{9}/" if self.ids is IdStyle.NINE else "/[a-zA-Z0-9_-]{1,32}/",
            Slot.INDEX: "/[0-9]{1,2}/",
        }
        for piece in self.call:
            if piece is Slot.NAME:
                piece = json.dumps(name)[1:-1] if self.is_object else name
            if isinstance(piece, str):
                text += piece
                continue
            yield literal(text)
            text = ""
            yield slots[piece]
        yield literal(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
