"""Forms in which each argument of a call stands by itself, with its name and its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.plain_messages import Tools, meant_arguments
from edge_spec.text.tools.arguments import arguments_schema, in_style
from edge_spec.text.tools.json_form import MAX_CALLS
from edge_spec.text.tools.keyed_reader import KeyedReader
from edge_spec.text.tools.keyed_shape import KeyedShape
from edge_spec.text.tools.value_rules import ANYTHING, ValueRules, literal, regex_of


@dataclass(frozen=True)
class KeyedForm(KeyedShape):
    """Calls have arguments that stand by themselves."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker,) if self.marker else ()

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        between = self.closing + self.opening if self.between is None else self.between
        functions = [self._call(call["function"]) for call in calls]
        return f"{self.opening}{between.join(functions)}{self.closing}"

    def _call(self, function: Mapping[str, Any]) -> str:
        values = meant_arguments(function.get("arguments", {}))
        order = sorted(values) if self.is_sorted else values
        arguments = [
            f"{self.key_opening}{name}{self.before_value(isinstance(values[name], str))}"
            f"{self.style.written(values[name])}{self.value_closing}"
            for name in order
        ]
        return f"{function['name']}{self.head}{self.comma.join(arguments)}"

    def reader(self, tools: Tools = ()) -> KeyedReader:
        return KeyedReader(self, tools)

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        rules = ["%llguidance {}", *self._calls(tools, several), *self._functions(tools)]
        if required:
            rules += ["start: calls"]
        elif text is not None:
            rules += ["start: calls | text", f"text: %json {in_style(text.held().schema)}"]
        elif self.marker:
            rules += ["start: SAID | opened rest", f"SAID: {self._said(tools)}"]
            rules += [f"opened[lazy]: SAID {literal(self.marker)}"]
        else:
            begun = self._begun(self.opening, tools)
            rules += ["start: TEXT | calls", f"TEXT: {ANYTHING} & ~/{begun}(.|\\n)*/"]
        return Grammar.lark("\n".join(rules))

    def _said(self, tools: Tools) -> str:
        """Text has no calls in it whose outer tag the model has left out."""
        if not self.inner_marker:
            return ANYTHING
        return f"{ANYTHING} & ~/(.|\\n)*{self._begun(self.inner_marker, tools)}(.|\\n)*/"

    def _begun(self, opening: str, tools: Tools) -> str:
        """Returns a regular expression of what begins a call."""
        names = "|".join(regex_of(tool["function"]["name"]) for tool in tools)
        return f"{regex_of(opening)}({names}){regex_of(self.head.rstrip())}"

    def _calls(self, tools: Tools, several: bool) -> list[str]:
        again = ""
        if several and self.between is not None:
            again = f"({literal(self.between)} call){{0,{MAX_CALLS - 1}}}"
        rest = f"{again} {literal(self.closing)}"
        if not self.marker:  # what tells a call from text has to be one literal
            names = [tool["function"]["name"] for tool in tools]
            heads = [literal(f"{self.opening}{name}{self.head}") for name in names]
            first = " | ".join(f"{head} arguments{index}" for index, head in enumerate(heads))
            return [f"calls: ({first}) {rest}"]
        start = self.opening.find(self.marker) + len(self.marker)
        return [
            f"calls: {literal(self.opening[:start])} rest",
            f"rest: {literal(self.opening[start:])} call {rest}",
        ]

    def _functions(self, tools: Tools) -> list[str]:
        rules = ["call: " + " | ".join(f"call{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            function = tool["function"]
            schema = arguments_schema(function)
            definitions = schema.get("$defs", {})
            values = ValueRules(self.style, f"v{index}", definitions, self.value_closing)

            def entry(name: str, value: Any, values: ValueRules = values) -> str:
                return f"{literal(self.key_opening)} {name} {self._valued(value, values)}"

            arguments = values.members(schema, entry, self.comma, is_sorted=self.is_sorted)
            head = literal(f"{function['name']}{self.head}")
            rules += [f"call{index}: {head} arguments{index}", f"arguments{index}: {arguments}"]
            rules += values.rules
        return rules

    def _valued(self, schema: Any, values: ValueRules) -> str:
        """What stands before a value says whether it is a text, in some forms."""
        if self.plain_key_closing is None:
            return f"{literal(self.key_closing)} {values.argument(schema)}"
        texts, others = values.apart(schema)
        found = [f"{literal(self.key_closing)} {values.argument(each)}" for each in texts]
        found += [f"{literal(self.plain_key_closing)} {values.argument(each)}" for each in others]
        return f"({' | '.join(found)})"
