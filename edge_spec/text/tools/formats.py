"""The formats in which models call tools: the rows of `FORMATS`, and gpt-oss's channels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.answer_form import AnswerForm, AnswerReader
from edge_spec.text.parts.part import EndedError, PartKind, PartReader, Steps, first_of
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import Keyed, arguments_schema, as_lark
from edge_spec.text.tools.call_format import (
    ANYTHING,
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    CallFormat,
    literal,
)
from edge_spec.text.tools.reader import CallReader, CallSteps


def _tags(tag: str, gap: str = "\n") -> CallFormat:
    opening, closing = f"<{tag}>{gap}", f"{gap}</{tag}>"
    return CallFormat(opening, _NAMED, f"{closing}\n{opening}", closing)


def _list(opening: str, closing: str, call: str = "", between: str = ", ") -> CallFormat:
    return CallFormat(opening, call or _NAMED, between, closing)


def _function(tag: str, colon: str, closing: str) -> CallFormat:
    """XML with names in tags, as in Qwen3-Coder."""
    opening, end = f"<{tag}>\n<function=", f"</function>\n</{tag}>"
    closing = f"{closing}</parameter>\n"
    keyed = Keyed("<parameter=", colon, closing, has_python_words=True)
    return CallFormat(opening, f"{NAME}>\n{ARGUMENTS}", f"{end}\n{opening}", end, keyed=keyed)


def _pairs(head: str, gap: str, end: str = "") -> CallFormat:
    """XML with a tag per name and value, as in GLM."""
    keyed = Keyed("<arg_key>", f"</arg_key>{gap}<arg_value>", f"</arg_value>{end}")
    opening, closing = "<tool_call>", "</tool_call>"
    call, between = f"{NAME}{head}{ARGUMENTS}", f"{closing}{head}{opening}"
    return CallFormat(opening, call, between, closing, keyed=keyed)


def _section(begin: str, kind: str, before: str, after: str, gap: str = "") -> CallFormat:
    """Names and JSON between special tokens, as in DeepSeek."""
    section, call = (f"<{begin}{word}\u2581{{}}\uff5c>" for word in ("calls", "call"))
    sep = f"<{begin}sep\uff5c>"
    opening = f"{call.format('begin')}{kind}{sep if kind else ''}"
    end = f"{after}{call.format('end')}"
    return CallFormat(
        section.format("begin") + opening,
        f"{NAME}{before or sep}{ARGUMENTS}",
        f"{end}{gap}{opening}",
        end + section.format("end"),
    )


def _python(opening: str, closing: str) -> CallFormat:
    keyed = Keyed("", "=", "", ", ", quote='"', has_python_words=True)
    return CallFormat(opening, f"{NAME}({ARGUMENTS}", "), ", f"){closing}", keyed=keyed)


_NAMED = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_PARAMETERS = f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'
_WITH_ID = f'{_NAMED[:-1]}, "id": "{ID}"}}'

GENERIC = _tags("tool_call")  # also for templates without tool support
PYTHON = _python("[", "]")
FORMATS = {  # named after models that use them
    "hermes": GENERIC,  # and Qwen, Granite 4
    "exaone-4": _tags("tool_call", ""),
    "mistral-v3": _list("[TOOL_CALLS] [", "]", _WITH_ID),
    "mistral-nemo": _list("[TOOL_CALLS][", "]", _WITH_ID),
    "mistral-v13": CallFormat("[TOOL_CALLS]", f"{NAME}[ARGS]{ARGUMENTS}", "[TOOL_CALLS]", ""),
    "mistral-v11": CallFormat(
        "[TOOL_CALLS]", f"{NAME}[CALL_ID]{ID}[ARGS]{ARGUMENTS}", "[TOOL_CALLS]", ""
    ),
    "phi-4": _list("<|tool_call|>[", "]<|/tool_call|>"),
    "granite-3": _list("<|tool_call|>[", "]"),
    "apriel": _list("<tool_calls>[", "]</tool_calls>"),  # and Jamba
    "minimax-m1": _list("<tool_calls>\n", "\n</tool_calls>", between="\n"),
    "nemotron-nano-2": _list("<TOOLCALL>[", "]</TOOLCALL>"),
    "apertus": _list("<|tools_prefix|>[", "]<|tools_suffix|>", f'{{"{NAME}": {ARGUMENTS}}}'),
    "command-r7b": _list(
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
        f'{{"tool_call_id": "{INDEX}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
        ",\n    ",
    ),
    "command-r": _list(
        "Action:\n```json\n[\n    ",
        "\n]```",
        f'{{\n        "tool_name": "{NAME}",\n        "parameters": {ARGUMENTS}\n    }}',
        ",\n    ",
    ),
    "deepseek-v3": _section("\uff5ctool\u2581", "function", "\n```json\n", "\n```", "\n"),
    "deepseek-v3.1": _section("\uff5ctool\u2581", "", "", ""),
    "qwen3-coder": _function("tool_call", ">\n", "\n"),  # and Qwen 3.5, Nemotron 3, Step 3.5
    "seed-oss": _function("seed:tool_call", ">", ""),
    "glm-4.5": _pairs("\n", "\n", "\n"),
    "glm-4.7": _pairs("", ""),
    "minimax-m2": CallFormat(  # XML with the names in attributes
        '<minimax:tool_call>\n<invoke name="',
        f'{NAME}">\n{ARGUMENTS}',
        '</invoke>\n<invoke name="',
        "</invoke>\n</minimax:tool_call>",
        keyed=Keyed('<parameter name="', '">', "</parameter>\n"),
    ),
    "gemma-4": CallFormat(
        "<|tool_call>call:",
        f"{NAME}{{{ARGUMENTS}",
        "}<tool_call|><|tool_call>call:",
        "}<tool_call|>",
        keyed=Keyed("", ":", "", ",", quote='<|"|>'),
    ),
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    # calls that are the whole answer
    "llama-3": CallFormat("", _PARAMETERS, None, ""),
    "llama-4": PYTHON,
}
# Formats that some templates describe without showing calls, or that only tokens reveal.
_TOLD = ("hermes", "phi-4", "granite-3", "llama-4", "lfm2")
STATED = (*(FORMATS[name] for name in _TOLD), _list("[", "]"))

_DESCRIPTION = """\
You may call these functions. Each is described in JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON in this form:
{call}
{several}If no function helps, answer without a call."""
_SEVERAL = """\
Several calls follow one another. What they return comes next, between <tool_response> tags. """


def described(tools: Tools, form: ToolForm = GENERIC) -> str:
    """Return a system message's text for templates without tool support."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}}
    several = _SEVERAL if form is GENERIC else ""
    return _DESCRIPTION.format(tools=listed, call=form.written([example]), several=several)


# Answers of messages in channels: thoughts, text and calls, each with a header that names a channel
# and, for a call, the function, in either order. Only the end of a call or of the last message ends
# the answer.
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END = "<|end|>"
_ENDS = (_END, "<|call|>", "<|return|>")
_SPEAKER = f"{_START}assistant"
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_SPEAKERS = ("assistant", "user", "all")  # these are not functions
_MAX_BEFORE = 16  # messages before the call or text that ends an answer


class HarmonyForm:
    """gpt-oss's format; a call ends the answer."""

    markers = (_CHANNEL, _START)
    keyed = None

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return _SPEAKER.join(self._call(call["function"]) for call in calls)

    def _call(self, function: Mapping[str, Any]) -> str:
        given = function.get("arguments", {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        header = f" to={_FUNCTIONS}{function['name']}{_CHANNEL}commentary json{_MESSAGE}"
        return f"{header}{arguments}<|call|>"

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
ToolForm = CallFormat | HarmonyForm


class HarmonyReader(CallSteps):
    """Splits an answer by message headers. Messages to unknown tools, such as invented ones, are
    thoughts."""

    def __init__(self, answer: AnswerForm) -> None:
        self._names = {tool["function"]["name"] for tool in answer.tools}
        super().__init__(answer)

    def _read(self) -> Steps[None]:
        if self._answer.is_opened or self._answer.is_begun:
            yield from self._read_body(PartKind.REASONING)
        while True:
            kind = PartKind.TEXT
            if (yield from self._is_at_header()):
                kind = yield from self._read_header()
            yield from self._read_body(kind)

    def _is_at_header(self) -> Steps[bool]:
        begun = (_START, _CHANNEL, "to=")
        while True:
            held = self._held.lstrip()
            if held.startswith(begun) or not any(each.startswith(held) for each in begun):
                return held.startswith(begun)
            try:
                yield from self._more()
            except EndedError:  # too short for a header
                self._show(len(self._held) if held else 0)
                raise

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
        recipient = _recipient(header)
        if recipient is None:
            return None
        name = recipient.removeprefix(_FUNCTIONS)
        return name if name != recipient or name in self._names else None


def _recipient(header: str) -> str | None:
    found = [each for each in _RECIPIENT.findall(header) if each not in _SPEAKERS]
    return found[-1] if found else None


def answer_reader(answer: AnswerForm) -> PartReader:
    """Return a reader for one answer. With known tools, untyped values get their schema's type."""
    if isinstance(answer.calls, CallFormat):
        return CallReader(answer)
    return AnswerReader(answer) if answer.calls is None else HarmonyReader(answer)
