"""Detect the format in which a chat template writes tool calls, by comparing rendered probes with
each row of `FORMATS`. Names of templates and models are never used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from edge_spec.text.plain_messages import (
    PROBE_ARGUMENTS,
    THOUGHTS,
    Message,
    Tools,
    joined,
    with_call_arguments,
)
from edge_spec.text.tools.call_format import SHORT_ID, TAG, CallFormat
from edge_spec.text.tools.formats import (
    FORMATS,
    GENERIC,
    HARMONY,
    PYTHON,
    STATED,
    ToolForm,
    described,
)

_LIST = re.compile(r'\[\s*\{\s*"name":\s*"[^"]*",\s*"arguments":')  # an example of calls
_PYTHON = re.compile(r"\[\w+\(\w+=[^()]*\)")
# Words that no template contains.
_TEXT, _SAID, _RESULT = "probe-text", "probe-assistant", "probe-result"
_LISTED, _CALLED = "probe_listed", "probe_called"
(_ARGUMENT,), (_VALUE,) = PROBE_ARGUMENTS, PROBE_ARGUMENTS.values()
_USER = {"role": "user", "content": "probe-user"}
_ENDED = {"add_generation_prompt": False}
_UNLISTED: tuple[Tools, Sequence[Message]] = ((), ())
_SCHEMA = {
    "type": "object",
    "properties": {_ARGUMENT: {"type": "string", "description": "A probe."}},
    "required": [_ARGUMENT],
}
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {"name": _LISTED, "description": "A probe.", "parameters": _SCHEMA},
    }
]


@dataclass(frozen=True)
class NativeTools:
    """How a template with tool support wants calls.

    takes_several: in one message. takes_text: before calls, also with a thought; else text is a
    message of its own. takes_any_id: else nine letters and digits. shows_calls, shows_results: else
    contents must contain them. shows_tools: else a message describes them, or the system message
    carries them (tools_in_system).
    """

    form: ToolForm
    takes_several: bool = True
    takes_text: bool = True
    takes_any_id: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    shows_tools: bool = True
    tools_in_system: bool = False


# For templates without tool support: calls and results become text, and tools are described.
SPELLED = NativeTools(GENERIC, shows_calls=False, shows_results=False, shows_tools=False)


def native_tools(
    render: Callable[..., str], tokens: Callable[[], Collection[str]]
) -> NativeTools | None:
    """Return None without a known format that the template shows or describes.

    render: "" if the template refuses. tokens: the model's added tokens, which may reveal the
    format.
    """
    probes = _Probes(render)
    return probes.shown() or probes.stated(tokens)


class _Probes:
    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render

    @cached_property
    def _listing(self) -> tuple[Tools, Sequence[Message]]:
        """Return how a prompt shows tools: as tools, or in a system message."""
        system = with_tools({"role": "system", "content": ""}, _TOOLS)
        ways: list[tuple[Tools, Sequence[Message]]] = [(_TOOLS, ()), ((), (system,))]
        listed = (way for way in ways if _LISTED in self._render([*way[1], _USER], way[0]))
        return next(listed, _UNLISTED)

    def _text(self, *answer: Message, **options: Any) -> str:
        tools, system = self._listing
        return self._render([*system, _USER, *answer], options.pop("tools", tools), **options)

    def _native(self, form: ToolForm, **traits: bool) -> NativeTools:
        tools, system = self._listing
        return NativeTools(form, shows_tools=bool(tools), tools_in_system=bool(system), **traits)

    def shown(self) -> NativeTools | None:
        """Return the format of shown calls; None if unknown."""
        if _RESULT not in self._text(*_conversation()):
            return None
        for ids in (("probe0001", "probe0002"), ("probe0001",)):
            form = self._form_of(*_conversation(ids=ids))
            if form is not None:
                takes_any_id = bool(self._text(*_conversation(ids=("call_probe00000000000000",))))
                several, text = len(ids) > 1, self._takes_text()
                return self._native(
                    form, takes_several=several, takes_text=text, takes_any_id=takes_any_id
                )
        return None

    def _form_of(self, answer: Message, *results: Message) -> ToolForm | None:
        """Return the format that writes calls as the template does; whitespace and quotes decide
        between several."""
        text = self._text(answer, **_ENDED) or self._text(answer, *results)
        said = self._text({"role": "assistant", "content": _SAID}, **_ENDED)
        beginnings = (said.partition(_SAID)[0], self._text() or said)
        forms: list[ToolForm] = [HARMONY, *FORMATS.values()]
        for shape, form in product(_SHAPES, forms):
            written, shown = shape(form.written(answer["tool_calls"])), shape(text)
            if isinstance(form, CallFormat) and form.is_bare:
                is_shown = shown.startswith(tuple(shape(each) + written for each in beginnings))
            else:
                is_shown = written in shown
            if is_shown:
                return form
        return None

    def _takes_text(self) -> bool:
        """Return False if text is refused before calls or shown after them, also with a thought."""
        message, *results = _conversation(_TEXT)
        thought = dict.fromkeys(THOUGHTS, _SAID)
        texts = [self._text(each, *results) for each in (message, {**message, **thought})]
        return all(text and not 0 <= text.find(_CALLED) < text.find(_TEXT) for text in texts)

    def stated(self, tokens: Callable[[], Collection[str]]) -> NativeTools | None:
        """Return the format that a template without calls describes, or whose tags are tokens."""
        whole = self._text(*_conversation())
        if self._listing == _UNLISTED or not whole:
            return None
        without = self._text(tools=())
        # For Python-style calls, what some templates show differs from what they ask for.
        forms = [PYTHON] if _VALUE in whole else STATED
        told = (form for form in forms if _states(whole, form) and not _states(without, form))
        added = set(tokens())
        spelled = (form for form in forms if _tags(form) and _tags(form) <= added)
        form = next(told, next(spelled, None))
        if form is None:
            return None
        return self._native(form, shows_calls=False, shows_results=_RESULT in whole)


def _conversation(content: str = "", ids: Sequence[str] = ("probe0001",)) -> list[Message]:
    function = {"name": _CALLED, "arguments": PROBE_ARGUMENTS}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    result = {"role": "tool", "content": _RESULT, "name": _CALLED}
    results = [{**result, "tool_call_id": id} for id in ids]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).replace("'", '"')


_SHAPES: tuple[Callable[[str], str], ...] = (str, _squeezed)


def _states(text: str, form: CallFormat) -> bool:
    if tags := _tags(form):
        return all(tag in text for tag in tags)
    return (_LIST if form.keyed is None else _PYTHON).search(text) is not None


def _tags(form: CallFormat) -> set[str]:
    return set(TAG.findall(form.opening + form.closing))


def with_tools(message: Message, tools: Tools) -> Message:
    """Put tools into a system message, where some templates read them."""
    functions = [tool["function"] for tool in tools]
    return {**message, "tools": json.dumps(functions, ensure_ascii=False)}


def native_history(
    messages: Sequence[Message], tools: Tools, native: NativeTools
) -> tuple[Sequence[Message], Tools]:
    """Return messages and tools that the template can render."""
    turns = [part for turn in _turns(messages) for part in _parts(turn, native)]
    if not native.takes_any_id:
        turns = list(_with_ids(turns))
    messages = [_native(each, native) for turn in turns for each in turn]
    if native.shows_tools or not tools:
        return messages, tools
    system: Message = {"role": "system", "content": ""}
    if native.tools_in_system:
        system = with_tools(system, tools)
    else:
        system = {**system, "content": described(tools, native.form)}
    if messages and messages[0]["role"] == "system":
        return [joined(messages[0], system), *messages[1:]], ()
    return [system, *messages], ()


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and turns:
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _parts(turn: Sequence[Message], native: NativeTools) -> Iterator[list[Message]]:
    """Split a turn as the template needs: text before calls, and each of several calls."""
    message, *results = turn
    calls = message.get("tool_calls") or ()
    text = message.get("content") if calls else None
    if text and not native.takes_text:
        yield [{"role": message["role"], "content": text}]
        message = {name: value for name, value in message.items() if name != "content"}
    if native.takes_several or len(calls) < 2:
        yield [message, *results]
        return
    last = len(calls) - 1
    for index, call in enumerate(calls):
        own = {"role": message["role"]} if index else message
        after = results[index : None if index == last else index + 1]
        yield [{**own, "tool_calls": [call]}, *after]


def _with_ids(turns: Sequence[Sequence[Message]]) -> Iterator[list[Message]]:
    """Replace long ids by short ones, reproducibly."""
    count = 0
    for message, *results in turns:
        calls = message.get("tool_calls") or ()
        ids = [_short_id(call.get("id"), count + index) for index, call in enumerate(calls)]
        count += len(ids)
        if calls:
            calls = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": calls}
        own = [{**each, "tool_call_id": id} for each, id in zip(results, ids, strict=False)]
        yield [message, *own, *results[len(own) :]]


def _short_id(given: Any, index: int) -> str:
    if isinstance(given, str) and SHORT_ID.fullmatch(given):
        return given
    known = given if isinstance(given, str) else str(index)
    return hashlib.sha256(known.encode()).hexdigest()[:9]


def _native(message: Message, native: NativeTools) -> Message:
    """Turn calls and results into text if the template does not show them."""
    if message["role"] == "tool" and not native.shows_results:
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = [_native_call(call, native) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    if native.shows_calls:
        return {**message, "tool_calls": [{"type": "function", **call} for call in calls]}
    parts = (message.get("content") or "", native.form.written(calls))
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, parts))}


def _native_call(call: Mapping[str, Any], native: NativeTools) -> Mapping[str, Any]:
    """Keyed formats need an object, so other arguments, such as those of a call that was cut off,
    are wrapped."""
    arguments = call["function"].get("arguments")
    arguments = {} if arguments is None else arguments
    if native.form.keyed is not None and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return with_call_arguments(call, arguments)
