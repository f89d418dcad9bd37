"""The form of answers that are messages in channels: thoughts, text and calls, each with a header.

A header names a channel and, of a call, the function, in either order. Only the end of a call or of
the last message ends the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.part import EndedError, PartKind, PartReader, Steps, first_of
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import arguments_schema, as_lark
from edge_spec.text.tools.call_grammar import ANYTHING, literal
from edge_spec.text.tools.steps import CallSteps

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
    short_ids = False
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


class HarmonyReader(CallSteps):
    """Tells thoughts, text and calls apart by the headers of messages. What is told to a tool that
    is none of the functions, such as one that the model has made up, counts as a thought."""

    def __init__(self, names: set[str]) -> None:
        """names: of the functions that may be called; empty where they are not known."""
        self._names = names
        super().__init__()

    def _read(self) -> Steps[None]:
        begun, kind = (_START, _CHANNEL, "to="), PartKind.TEXT
        while (held := self._held.lstrip()) not in begun and any(
            each.startswith(held) for each in begun
        ):
            try:
                yield from self._more()
            except EndedError:  # it is as little as the beginning of a header
                self._add(PartKind.TEXT, self._held)
                return
        has_header = held.startswith(begun)
        while True:
            if has_header:
                kind = yield from self._read_header()
            yield from self._read_body(kind)
            while True:  # what is before the next header is no one's
                place, marker = first_of((_START, _CHANNEL), self._held)
                self._take(place)
                if marker:
                    break
                yield from self._more()
            has_header = True

    def _read_header(self) -> Steps[PartKind]:
        try:
            while _MESSAGE not in self._held:
                yield from self._more()
        except EndedError:
            self.is_cut = self._function(self._held) is not None
            raise
        header = self._take(self._held.index(_MESSAGE) + len(_MESSAGE))
        function = self._function(header)
        if function is not None:
            self._begin_call(function)
            return PartKind.CALL
        channels = _NAMED_CHANNEL.findall(header)
        is_thought = channels[-1:] == ["analysis"] or _recipient(header) is not None
        kind = PartKind.REASONING if is_thought else PartKind.TEXT
        self._add(kind, "")
        return kind

    def _read_body(self, kind: PartKind) -> Steps[None]:
        told = marker = ""
        while not marker:
            place, marker = first_of((*_ENDS, _START, _CHANNEL), self._held)
            is_last = self._has_ended and not marker
            text = self._take(len(self._held) if is_last else place)
            text = text.lstrip() if kind is PartKind.CALL and not told else text
            told += text
            if text:
                self._add(kind, text)
            if is_last:
                break
            if not marker:
                with suppress(EndedError):
                    yield from self._more()
        self._take(len(marker) if marker in _ENDS else 0)
        if kind is PartKind.CALL:
            self._add_arguments("" if told else "{}")
            try:
                json.loads(told or "{}")
            except (ValueError, RecursionError):
                self.is_cut = True

    def _function(self, header: str) -> str | None:
        """Return the name of the function that a message calls."""
        recipient = _recipient(header)
        if recipient is None:
            return None
        name = recipient.removeprefix(_FUNCTIONS)
        return name if name != recipient or name in self._names else None


def _recipient(header: str) -> str | None:
    """Return to whom a message is, if not to the user."""
    found = [each for each in _RECIPIENT.findall(header) if each not in _SPEAKERS]
    return found[-1] if found else None
