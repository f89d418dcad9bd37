"""Formats of tool calls, and the grammars that constrain answers to them."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.plain_messages import Tools, meant_arguments
from edge_spec.text.tools.arguments import (
    ANY,
    TEXT,
    Keyed,
    arguments_schema,
    as_lark,
    choices_of,
    definitions_of,
    listed,
    members_of,
    types_of,
)

_log = logging.getLogger(__name__)

NAME, ARGUMENTS, ID, INDEX = "$NAME", "$ARGUMENTS", "$ID", "$INDEX"  # placeholders in a call
SLOTS = re.compile(r"(\$(?:NAME|ARGUMENTS|ID|INDEX))")
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
MAX_CALLS = 16  # in one answer: a small model may repeat a call without end
ANYTHING = "/(.|\\n)*/"
_NOTHING = '""'
_OTHER_NAME = r"/[a-zA-Z_][a-zA-Z0-9_.-]*/"  # of an argument that the schema does not name
_PYTHON_WORDS: Mapping[Any, Sequence[Any]] = {"boolean": (True, False), "null": (None,)}


def marker_of(opening: str) -> str:
    """Return the part of an opening that text does not contain."""
    tag = TAG.match(opening)
    return tag.group() if tag else opening.rstrip()


def new_id() -> str:
    """Return nine letters and digits, since some templates accept no other ids."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class CallFormat:
    """Calls are `opening`, calls with `between` in between, and `closing`.

    call: text with $NAME, $ARGUMENTS, $ID and $INDEX. Arguments are JSON, unless `keyed` says how
    they are written one by one. opening: "" or "[" if the calls are the whole answer. between: None
    for a single call.
    """

    opening: str
    call: str
    between: str | None
    closing: str
    keyed: Keyed | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the calls are the whole answer, unmarked."""
        return self.opening in ("", "[")

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object that contains the name."""
        return self.call.startswith("{")

    @property
    def is_named(self) -> bool:
        """Whether that object has keys for the name and the arguments."""
        return self.is_object and f': "{NAME}"' in self.call

    @cached_property
    def head(self) -> list[str]:
        return [each for each in SLOTS.split(self.call.partition(ARGUMENTS)[0]) if each]

    @property
    def after_name(self) -> str:
        return self.call.partition(NAME)[2].partition(ARGUMENTS)[0]

    @cached_property
    def marker(self) -> str:
        """What begins the first call, and no text."""
        if self.is_bare:
            return self.opening + self.head[0] if self.is_object else ""
        return marker_of(self.opening)

    @cached_property
    def openings(self) -> list[str]:
        """What may begin calls. Models may leave out what surrounds all calls, such as an array's
        bracket or the outer tag."""
        if self.is_bare:
            return []
        rest = self.opening.removeprefix(self.marker).lstrip()
        inner = rest if rest.startswith("<") else ""
        if self.is_object:
            inner = self.opening.rstrip("[ \n")
        return [each for each in dict.fromkeys((self.opening, inner)) if each.strip()]

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker,) if self.marker else ()

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls from messages."""
        between = f"{self.closing}\n{self.opening}" if self.between is None else self.between
        written = [self._written(index, call) for index, call in enumerate(calls)]
        return f"{self.opening}{between.join(written)}{self.closing}"

    def _written(self, index: int, call: Mapping[str, Any]) -> str:
        name: str = call["function"]["name"]
        given = call["function"].get("arguments", {})
        if self.keyed is not None:
            arguments = self.keyed.written(meant_arguments(given))
        else:
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        id = call.get("id") or new_id()
        slots: dict[str, str] = {NAME: name, ARGUMENTS: arguments, ID: id, INDEX: str(index)}
        return "".join(slots.get(piece, piece) for piece in SLOTS.split(self.call))

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        """Constrain an answer to calls of `tools` from the first one's beginning; nothing follows
        the last one.

        required: no text first. several: up to MAX_CALLS. text: schema of an answer without calls.
        Raises UsageError for an invalid or unsatisfiable schema.
        """
        rules = ["%llguidance {}", *_calls(self, tools, several), *_functions(self, tools)]
        if required:
            rules += ["start: calls"]
        elif text is not None:
            rules += ["start: calls | text", f"text: %json {as_lark(text.held().schema)}"]
        elif self.is_bare:  # text must not begin like a call
            names = "|".join(regex_of(tool["function"]["name"]) for tool in tools)
            before = self.opening + self.call.partition(NAME)[0]
            after = self.after_name.rstrip()
            begun = f"{regex_of(before)}({names}){regex_of(after)}"
            rules += ["start: TEXT | calls", f"TEXT: {ANYTHING} & ~/{begun}(.|\\n)*/"]
        else:
            rules += ["start: TEXT | opened rest", f"TEXT: {ANYTHING}"]
            rules += [f"opened[lazy]: TEXT {literal(self.marker)}"]
        return Grammar.lark("\n".join(rules))


def literal(text: str) -> str:
    """Return a Lark literal in which special tokens match as tokens."""
    return f"@{json.dumps(text, ensure_ascii=False)}" if text else ""


def _calls(form: CallFormat, tools: Tools, several: bool) -> list[str]:
    rest = literal(form.closing)
    if several and form.between is not None:
        rest = f"({literal(form.between)} call){{0,{MAX_CALLS - 1}}} {rest}"
    if form.is_bare and form.keyed is not None:  # a single literal distinguishes a call from text
        names = [tool["function"]["name"] for tool in tools]
        heads = [literal(f"{form.opening}{name}{form.after_name}") for name in names]
        first = " | ".join(f"{head} arguments{index}" for index, head in enumerate(heads))
        return [f"calls: ({first}) {rest}"]
    marker = "" if form.is_bare else form.marker
    opening = literal(form.opening.removeprefix(marker))
    return [f"calls: {literal(marker)} rest", f"rest: {opening} call {rest}"]


def _functions(form: CallFormat, tools: Tools) -> list[str]:
    rules = ["call: " + " | ".join(f"call{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"])[1:-1] if form.is_object else function["name"]
        slots = {
            ARGUMENTS: f"arguments{index}",
            ID: "/[a-zA-Z0-9]{9}/",
            INDEX: "/[0-9]{1,2}/",
        }
        text = re.split(r"(\$(?:ARGUMENTS|ID|INDEX))", form.call.replace(NAME, name))
        rules.append(f"call{index}: " + " ".join(slots.get(p) or literal(p) for p in text))
        schema = arguments_schema(function)
        if form.keyed is None:
            rules.append(f"arguments{index}: %json {as_lark(schema)}")
        else:
            values = _ValueRules(form.keyed, f"v{index}", definitions_of(schema))
            rules += [f"arguments{index}: {values.arguments(schema)}", *values.rules]
    return rules


class _ValueRules:
    """Builds rules of arguments written one by one. Only bare or specially quoted strings need own
    rules; the rest is left to %json."""

    def __init__(self, keyed: Keyed, prefix: str, definitions: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._keyed = keyed
        self._prefix = prefix
        self._definitions = definitions

    def arguments(self, schema: Mapping[str, Any]) -> str:
        properties, required, others = members_of(schema, self._definitions)
        other = self._argument(self._other_name(properties), others) if others else ""
        entries = [
            (self._argument(literal(name), value), name in required)
            for name, value in properties.items()
            if value is not False
        ]
        if not self._keyed.comma:
            parts = [entry if must else f"({entry})?" for entry, must in entries]
            return " ".join([*parts, *([f"({other})*"] if other else [])]) or _NOTHING
        return self._separated(entries, other, literal(self._keyed.comma))

    def _separated(self, entries: Sequence[tuple[str, bool]], other: str, comma: str) -> str:
        """Build from the end. after: what follows an entry; first: what may begin."""
        after = f"({comma} {other})*" if other else _NOTHING
        first = f"({other} {after})?" if other else _NOTHING
        for entry, must in reversed(entries):
            own = f"{comma} {entry}"
            follows = self._rule(after)
            after = f"{own if must else f'({own})?'} {follows}"
            first = f"{entry} {follows}" if must else f"({entry} {follows} | {self._rule(first)})"
        return self._rule(first)

    def _other_name(self, known: Iterable[str]) -> str:
        names = "|".join(map(regex_of, known))
        return self._terminal(_OTHER_NAME + (f" & ~/({names})/" if names else ""))

    def _argument(self, name: str, schema: Any) -> str:
        keyed = self._keyed
        kinds = [
            (each, types_of(each, self._definitions))
            for each in choices_of(schema, self._definitions)
        ]
        texts = [each for each, types in kinds if types in (TEXT, ANY)]
        others = [each for each, types in kinds if types != TEXT]
        # Without quotes, a string of any content also covers other values.
        if not keyed.quote and ANY in (types for _, types in kinds):
            others = []
        colon, closing = literal(keyed.colon), literal(keyed.closing)
        values = [f"{colon} {self._text(each)}" for each in texts]
        values += [f"{colon} {self._json(each)} {closing}" for each in others]
        return f"{literal(keyed.opening)} {name} {_one_of(values)}"

    def _json(self, schema: Any) -> str:
        found = [self._rule(f"%json {as_lark(schema, self._definitions)}")]
        if self._keyed.has_python_words and isinstance(schema, Mapping):
            words = listed(schema) or _PYTHON_WORDS.get(schema.get("type"), ())
            found += [f'"{word!r}"' for word in words if word is None or isinstance(word, bool)]
        return _one_of(found)

    def _text(self, schema: Any) -> str:
        """Return the rule of a string, which ends at its first closing."""
        schema = schema if isinstance(schema, Mapping) else {}
        quote, closing = self._keyed.quote, self._keyed.closing
        if self._keyed.is_python:
            return f"{self._json({**schema, 'type': 'string'})} {literal(closing)}"
        if others := schema.keys() - {"type", "enum", "const"}:
            _tell_not_held(", ".join(sorted(others)))
        closing, core = quote + closing, (quote + closing).strip()
        if (values := listed(schema)) is not None:
            told = [each for each in values if isinstance(each, str) and core not in each]
            texts = _one_of([json.dumps(each, ensure_ascii=False) for each in told])
            return f"{literal(quote)} {texts} {literal(closing)}"
        text = self._terminal(f"{ANYTHING} & ~/(.|\\n)*{regex_of(core)}(.|\\n)*/")
        name = self._name()
        self.rules.append(f"{name}[lazy]: {text} {literal(closing)}")
        return f"{literal(quote)} {name}"

    def _rule(self, expression: str) -> str:
        if re.fullmatch(r'\w+|""', expression):
            return expression
        self.rules.append(f"{(name := self._name())}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        self.rules.append(f"{(name := self._name().upper())}: {expression}")
        return name

    def _name(self) -> str:
        return f"{self._prefix}_{len(self.rules)}"


@cache
def _tell_not_held(keywords: str) -> None:
    _log.warning("string arguments without JSON's quotes are not held to %s", keywords)


def _one_of(expressions: Sequence[str]) -> str:
    found = list(dict.fromkeys(expressions))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})" if found else _NOTHING


def regex_of(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
