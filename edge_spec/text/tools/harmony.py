"""The form of answers that are messages in channels: thoughts, text and calls, each with a header.

A header names a channel and, of a call, the function, in either order. Only the end of a call or of
the last message ends the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.part import CallHead, Part, PartKind, PartReader
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import arguments_schema, as_lark
from edge_spec.text.tools.call_grammar import ANYTHING, literal
from edge_spec.text.tools.part_list import IdStyle
from edge_spec.text.tools.pieces import first_of

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END = "<|end|>"
_ENDS = (_END, "<|call|>", "<|return|>")
_SPEAKER = f"{_START}assistant"
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_SPEAKERS = ("assistant", "user", "all")  # who are no functions
_MAX_BEFORE = 16  # messages before a call or the text that ends an answer


class HarmonyForm:
    """An answer may have one call, which ends it."""

    markers = (_CHANNEL, _START)
    ids = IdStyle.ANY
    keyed = None
    marks_texts = True

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return _SPEAKER.join(self._call(call["function"]) for call in calls)

    def _call(self, function: Mapping[str, Any]) -> str:
        given = function.get("arguments", {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        header = f" to={_FUNCTIONS}{function['name']}{_CHANNEL}commentary json{_MESSAGE}"
        return f"{header}{arguments}<|call|>"

    def reader(self, tools: Tools = ()) -> PartReader:
        return HarmonyReader({tool["function"]["name"] for tool in tools})

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        calls = [f"call{index}" for index in range(len(tools))]
        last = calls if required else [*calls, "final"]
        final = ANYTHING if text is None else "json"
        speaker = literal(_SPEAKER)
        thought = literal(f"{_CHANNEL}analysis{_MESSAGE}")
        said = literal(f"{_CHANNEL}commentary{_MESSAGE}")
        rules = [
            "%llguidance {}",
            f"start: ({speaker})? (before {speaker}){{0,{_MAX_BEFORE}}} ({' | '.join(last)})",
            f"before: ({thought} | {said}) ended",
            f"ended[lazy]: {ANYTHING} {literal(_END)}",
            f"final: {literal(f'{_CHANNEL}final{_MESSAGE}')} {final}",
        ]
        if text is not None:
            rules.append(f"json: %json {as_lark(text.held().schema)}")
        for index, tool in enumerate(tools):
            name = f"to={_FUNCTIONS}{tool['function']['name']}"
            heads = (
                f" {name}{_CHANNEL}commentary json{_MESSAGE}",
                f"{_CHANNEL}commentary {name} <|constrain|>json{_MESSAGE}",
                f"{_CHANNEL}commentary {name}{_MESSAGE}",
            )
            rules.append(f"call{index}: ({' | '.join(map(literal, heads))}) arguments{index}")
            schema = as_lark(arguments_schema(tool["function"]))
            rules.append(f"arguments{index}: %json {schema}")
        return Grammar.lark("\n".join(rules))


HARMONY = HarmonyForm()


class HarmonyReader:
    """Tells thoughts, text and calls apart by the headers of messages. What is told to a tool that
    is none of the functions, such as one that the model has made up, counts as a thought."""

    def __init__(self, names: set[str]) -> None:
        """names: of the functions that may be called; empty where they are not known."""
        self.is_cut = False
        self.num_calls = 0
        self._names = names
        self._held = ""
        self._kind = PartKind.TEXT
        self._arguments = ""
        self._parts: list[Part] = []
        self._read: Callable[[], bool] = self._read_first

    def push(self, markup: str) -> list[Part]:
        self._held += markup
        while self._read():
            pass
        return self._told()

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._read == self._read_body:
            self._add(held)
            self._end_body()
        elif self._read == self._read_first:
            self._add(held)
        elif self._read == self._read_header:
            self.is_cut = self._function(held) is not None
        return self._told()

    def _told(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_first(self) -> bool:
        """The answer begins with a header, or with text whose header was read before."""
        text = self._held.lstrip()
        beginnings = (_START, _CHANNEL, "to=")
        if any(each.startswith(text) and each != text for each in beginnings):
            return False
        self._read = self._read_header if text.startswith(beginnings) else self._read_body
        return True

    def _read_header(self) -> bool:
        header, found, after = self._held.partition(_MESSAGE)
        if not found:
            return False
        self._held, self._read = after, self._read_body
        function = self._function(header)
        channels = _NAMED_CHANNEL.findall(header)
        if function is not None:
            self._kind = PartKind.CALL
            self._begin_call(function)
            return True
        is_thought = channels[-1:] == ["analysis"] or self._recipient(header) is not None
        self._kind = PartKind.REASONING if is_thought else PartKind.TEXT
        self._parts.append(Part(self._kind, ""))
        return True

    def _read_body(self) -> bool:
        place, marker = first_of((*_ENDS, _START, _CHANNEL), self._held)
        self._add(self._held[:place])
        self._held = self._held[place:]
        if not marker:
            return False
        self._end_body()
        if marker in _ENDS:
            self._held = self._held.removeprefix(marker)
        self._read = self._read_between
        return True

    def _read_between(self) -> bool:
        """What stands before the next header is no one's."""
        place, marker = first_of((_START, _CHANNEL), self._held)
        self._held = self._held[place:]
        self._read = self._read_header if marker else self._read_between
        return bool(marker)

    def _recipient(self, header: str) -> str | None:
        """Returns to whom a message is, if not to the user."""
        found = [each for each in _RECIPIENT.findall(header) if each not in _SPEAKERS]
        return found[-1] if found else None

    def _function(self, header: str) -> str | None:
        """Returns the name of the function that a message calls."""
        recipient = self._recipient(header)
        if recipient is None:
            return None
        name = recipient.removeprefix(_FUNCTIONS)
        return name if name != recipient or name in self._names else None

    def _begin_call(self, name: str) -> None:
        head = CallHead(self.num_calls, IdStyle.ANY.made(name, self.num_calls), name)
        self.num_calls += 1
        self._arguments = ""
        self._parts.append(Part(PartKind.CALL, "", head))

    def _add(self, text: str) -> None:
        if self._kind is PartKind.CALL:
            text = text if self._arguments else text.lstrip()
            self._arguments += text
        if text:
            self._parts.append(Part(self._kind, text))

    def _end_body(self) -> None:
        if self._kind is not PartKind.CALL:
            return
        if not self._arguments.strip():
            self._add("{}")
        try:
            json.loads(self._arguments)
        except (ValueError, RecursionError):
            self.is_cut = True
