"""Forms in which the arguments of a call are a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import arguments_schema, in_style
from edge_spec.text.tools.call_object import Role
from edge_spec.text.tools.literals import TAG_PATTERN, Piece, Slot
from edge_spec.text.tools.part_list import IdStyle

if TYPE_CHECKING:
    from edge_spec.text.tools.json_reader import JsonReader

TAG, END_TAG = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # of one answer: a small model may repeat a call without end
_ANYTHING = "/(.|\\n)*/"
_ROLES = {Slot.NAME: Role.NAME, Slot.ARGUMENTS: Role.ARGUMENTS, Slot.ID: Role.ID}
# A call that is the whole answer. More space could become an answer of nothing else.
_SPACE = r"[ \t\r\n]{0,12}"
_BARE_HEAD = r'S(```(json)?S|<tools>S)?(\[S)?\{S("type"S:S"function"S,S)?"name"S:S"'.replace(
    "S", _SPACE
)
_BARE_ARGUMENTS = r'"S,S"(arguments|parameters)"S:S'.replace("S", _SPACE)
_BARE_END = r"S\}(S\])?(S(```|<\/tools>))?".replace("S", _SPACE)
_KEY = re.compile(r'"(\w+)"\s*:\s*"?$')  # before the value of a member


_NAMED: tuple[Piece, ...] = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")


@dataclass(frozen=True)
class JsonForm:
    """Calls are `opening`, a call, further ones each after `between`, and `closing`.

    call: either a JSON object with the name and the arguments in it, or a name and then the
    arguments, which are one. opening: "" where the object is the whole answer, "[" where a list of
    them is. between: None where an answer has one call. first_index: the number of the first call,
    where calls are numbered.
    """

    opening: str = f"{TAG}\n"
    call: tuple[Piece, ...] = _NAMED
    between: str | None = f"\n{END_TAG}\n{TAG}\n"
    closing: str = f"\n{END_TAG}"
    ids: IdStyle = IdStyle.ANY
    first_index: int = 0

    @cached_property
    def is_object(self) -> bool:
        """Says whether a call is a JSON object with the name in it."""
        return isinstance(self.call[0], str) and self.call[0].startswith("{")

    @property
    def is_bare(self) -> bool:
        """Says whether the calls are the whole answer, and nothing else tells where they begin."""
        return self.opening.strip() in ("", "[")

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Returns what the members of the object say."""
        found = {}
        for before, slot in pairwise(self.call):
            key = _KEY.search(before) if isinstance(before, str) else None
            if key is not None and isinstance(slot, Slot) and slot in _ROLES:
                found[key[1]] = _ROLES[slot]
        return found

    @property
    def is_named(self) -> bool:
        """Says whether a call is an object that has the name and the arguments by these names."""
        roles = self.roles if self.is_object else {}
        return Role.NAME in roles.values() and Role.ARGUMENTS in roles.values()

    @property
    def is_keyed(self) -> bool:
        """Says whether the object's member is named as the function."""
        return self.is_object and Role.NAME not in self.roles.values()

    @cached_property
    def marker(self) -> str:
        """Returns what the first call begins with, and no text does."""
        if self.is_bare:
            return f"{self.opening}{self.call[0]}"
        return self.marker_of(self.opening)

    def marker_of(self, opening: str) -> str:
        tag = TAG_PATTERN.match(opening)
        return tag.group() if tag else opening.rstrip()

    def read_id(self, name: str, values: Mapping[Slot, str]) -> str | None:
        """Returns the id that the model wrote, if it did."""
        if self.ids is IdStyle.NAMED and Slot.INDEX in values:
            return f"functions.{name}:{values[Slot.INDEX]}"
        return values.get(Slot.ID)

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
        from edge_spec.text.tools.json_reader import JsonReader

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
            rules += self._answers([tool["function"]["name"] for tool in tools])
        return Grammar.lark("\n".join(rules))

    def _answers(self, names: Sequence[str]) -> list[str]:
        """Returns rules of text, or of text and then calls, or of a call as it is read where its
        tags are missing."""
        kinds = ["TEXT", "calls" if self.is_bare else "opened rest"]
        rules = [] if self.is_bare else [f"opened[lazy]: TEXT @{quoted(self.marker)}"]
        text = f"TEXT: {_ANYTHING}"
        if self.is_named:
            listed = "|".join(_in_pattern(name) for name in names)
            text += f' & ~/{_BARE_HEAD}({listed})"(.|\\n)*/'
            kinds.append("bare END")
            rules.append("bare: " + " | ".join(f"bare{index}" for index in range(len(names))))
            rules += [
                f"bare{index}: /{_BARE_HEAD}{_in_pattern(name)}{_BARE_ARGUMENTS}/ arguments{index}"
                for index, name in enumerate(names)
            ]
            rules.append(f"END: /{_BARE_END}/")
        return [f"start: {' | '.join(kinds)}", text, *rules]

    def _calls(self, several: bool) -> list[str]:
        marker = "" if self.is_bare else self.marker
        rest = f"{_literal(self.opening.removeprefix(marker))} call"
        if several and self.between is not None:
            rest += f" ({_literal(self.between)} call){{0,{MAX_CALLS - 1}}}"
        rest += f" {_literal(self.closing)}"
        return [f"calls: {_literal(marker)} rest", f"rest: {rest}"]

    def _functions(self, tools: Tools) -> list[str]:
        rules = ["call: " + " | ".join(f"call{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            function = tool["function"]
            rules += [f"call{index}: " + " ".join(self._parts(function["name"], index))]
            rules += [f"arguments{index}: %json {in_style(arguments_schema(function))}"]
        return rules

    def _parts(self, name: str, index: int) -> Iterator[str]:
        """Yields what a call of the function is made of, as Lark has it."""
        literal = ""
        slots = {
            Slot.ARGUMENTS: f"arguments{index}",
            Slot.ID: "/[a-zA-Z0-9]{9}/" if self.ids is IdStyle.NINE else "/[a-zA-Z0-9_-]{1,32}/",
            Slot.INDEX: "/[0-9]{1,2}/",
        }
        for piece in self.call:
            if piece is Slot.NAME:
                piece = json.dumps(name)[1:-1] if self.is_object else name
            if isinstance(piece, str):
                literal += piece
                continue
            yield _literal(literal)
            literal = ""
            yield slots[piece]
        yield _literal(literal)


def _in_pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _literal(text: str) -> str:
    return f"@{quoted(text)}" if text else ""


def quoted(text: str) -> str:
    """Returns a literal of Lark. After @, special tokens in it are tokens of the answer."""
    return _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
