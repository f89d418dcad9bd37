"""Reads text and calls out of an answer, which comes in pieces of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.text.parts.part import Part
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.call_shape import CallShape, marker_of
from edge_spec.text.tools.keyed import KeyedReader, ends_of
from edge_spec.text.tools.part_list import IdStyle, PartList
from edge_spec.text.tools.pieces import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    TAG,
    EndedError,
    Found,
    JsonEnd,
    StepReader,
    Steps,
    first_of,
)
from edge_spec.text.tools.values import argument_types

_FUNCTION = re.compile(r"[a-zA-Z0-9_.-]+")
# Models that were trained on several formats take the words of another one.
_ROLES = {"name": NAME, "tool_name": NAME, "arguments": ARGUMENTS, "parameters": ARGUMENTS}
_ID_KEY = re.compile(r'"(\w+)": "\$ID"')
_PYTHON_TAGS = ("", "<|python_start|>", "<|python_tag|>")  # before calls of Llama

# What models write around a call whose tags they have left out.
FENCE = "```"
NAMES = ("tool_call", "function_call", "tools", "tool", "response", "json", "JSON", "xml")
TAGS = tuple(f"<{name}>" for name in NAMES)
_ENDS = [f"</{name}>" for name in NAMES]
_LEFT = "}],;)"  # what a model may write too much of after a call
_BRACES = ("{", "[{")
_FENCES = ("", FENCE, f"{FENCE}json", f"{FENCE}xml")
_OPENINGS = [
    f"{fence}{tag}{brace}" for fence in _FENCES for tag in ("", *TAGS) for brace in _BRACES
]
_FIRST_OPENINGS = [*_OPENINGS, *(f"<|python_tag|>{brace}" for brace in _BRACES)]
_STARTS = (FENCE, *TAGS, "\n{", "\n[{")


class _NoCallError(Exception):
    """What was read is text, and no call."""

    def __init__(self, length: int) -> None:
        self.length = length


@dataclass
class _Object:
    """What is known of a call that is a JSON object. place: what was read of the held text."""

    place: int
    is_untagged: bool
    name: str | None = None
    id: str | None = None
    arguments: str | None = None
    is_told: bool = False


class CallReader(StepReader):
    """Splits an answer into text and calls of a format. What looks like a call and has no name
    stays text, so nothing that the model wrote is lost.

    Many a small model leaves the tags out: a JSON object with the name and the arguments of a
    function that may be called is a call all the same where it begins the answer, a line or a block
    of code.
    """

    def __init__(self, form: CallShape, tools: Tools) -> None:
        """tools: those that may be called; none where they are not known."""
        self._form = form
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._parts = PartList(form.ids)
        self._markers = [marker_of(opening) for opening in form.openings]
        self._reads_untagged = form.is_named and bool(tools)
        self._is_in_code = False
        self._shows_rest = True  # where the answer ends here, what is held is text
        self._is_open = False  # where it ends here, a call is cut
        super().__init__()

    def _taken(self) -> list[Part]:
        return self._parts.taken()

    def _read(self) -> Steps[None]:
        steps = self._read_first
        try:
            while True:
                self._shows_rest, self._is_open = True, False
                try:
                    yield from steps()
                except _NoCallError as error:
                    self._is_in_code |= self._pieces.held.lstrip().startswith(FENCE)
                    self._show(error.length)
                steps = self._read_next
        except EndedError:
            self.is_cut = self._is_open
            self._show(len(self._pieces.held) if self._shows_rest else 0)

    def _show(self, length: int) -> None:
        self._parts.add_text(self._pieces.take(length))

    def _begin(self, *, is_sure: bool = True) -> None:
        """A call has begun: nothing of it is text if it is cut."""
        self._shows_rest, self._is_open = not is_sure, is_sure

    # Text, and where calls begin in it

    def _read_first(self) -> Steps[None]:
        """Of some formats, the whole answer is a call, or a list of some, or none of it."""
        if self._form.is_bare and self._form.keyed is not None:
            openings = [tag + self._form.opening for tag in _PYTHON_TAGS]
            yield from self._read_calls(openings, is_known=True)
            while True:
                self._shows_rest, self._is_open = True, False
                self._show(len(self._pieces.held))
                yield from self._pieces.more()
        elif self._form.is_bare or self._reads_untagged:
            yield from self._read_untagged(_FIRST_OPENINGS)

    def _read_next(self) -> Steps[None]:
        """Read text up to calls, and these. Tags that are left after calls are no text."""
        pieces, starts = self._pieces, _STARTS if self._reads_untagged else ()
        starts = tuple(each for each in starts if each not in self._markers)
        while True:
            strays = TAG.findall(self._form.closing) if self._parts.num_calls else []
            strays = [each for each in strays if each not in self._markers]
            place, marker = first_of([*self._markers, *starts, *strays], pieces.held)
            self._show(place + marker.startswith("\n"))
            if marker in strays:
                pieces.take(len(marker))
            elif marker:
                break
            else:
                yield from pieces.more()
        if marker in starts:
            yield from self._read_start()
        elif not (yield from self._read_calls(self._form.openings)):
            marker = max((m for m in self._markers if pieces.held.startswith(m)), key=len)
            self._show(len(marker))

    def _read_start(self) -> Steps[None]:
        """The held text begins with a fence, a tag that is none of the format's, or a brace."""
        pieces = self._pieces
        if not self._is_in_code and (yield from self._read_untagged(_OPENINGS)):
            return
        length = 1
        if pieces.held.startswith(FENCE):
            while pieces.held == FENCE:
                yield from pieces.more()
            length = len(FENCE)
            self._is_in_code = not self._is_in_code or pieces.held[length].isalpha()
        self._show(length)

    def _read_untagged(self, openings: Sequence[str]) -> Steps[bool]:
        """Read calls without the format's tags, if one of these openings comes next, which end in
        their first brace."""
        own = tuple(self._markers)
        heads = [[each] for each in openings if not own or not each.startswith(own)]
        found = yield from self._pieces.find(*heads)
        if found is not None:
            yield from self._read_object(found.end - 1, is_untagged=True)
            yield from self._read_more_calls(is_untagged=True)
        return found is not None

    def _read_calls(self, openings: Sequence[str], *, is_known: bool = False) -> Steps[bool]:
        """Read calls, if one of these openings begins some. is_known: a function that the model
        was not told of is none."""
        for opening in openings:
            self._begin(is_sure=not self._form.is_bare)
            is_inner = opening == self._form.inner_marker
            if (yield from self._read_call(opening, is_known=is_known or is_inner)):
                yield from self._read_more_calls()
                return True
        self._begin(is_sure=False)
        return False

    # Calls

    def _read_call(self, opening: str, *, is_known: bool = False) -> Steps[bool]:
        form, pieces = self._form, self._pieces
        head = [opening] if form.is_object else [opening, *form.head]
        found = yield from pieces.find(head)
        if found is None:
            return False
        name = found.values.get(NAME, "")
        if form.keyed is not None:
            if (is_known and name not in self._tools) or not (
                yield from self._is_call(name, found)
            ):
                return False
            pieces.take(found.end)
            self._begin()
            self._parts.begin_call(name)
            reader = KeyedReader(form, form.keyed, pieces, self._parts)
            yield from reader.read(argument_types(self._tools.get(name)))
            return True
        place = yield from pieces.after_space(found.end)
        if pieces.held[place] != "{":
            return False
        if form.is_object:
            yield from self._read_object(place, is_untagged=form.is_bare)
            return True
        id = found.values.get(ID)
        if form.ids is IdStyle.NAMED and INDEX in found.values:
            id = f"functions.{name}:{found.values[INDEX]}"
        self._begin()
        self._parts.begin_call(name, id)
        pieces.take(place)
        yield from self._tell_object()
        return True

    def _is_call(self, name: str, found: Found) -> Steps[bool]:
        """Return True unless what follows a name has to tell that it is one of a call, and does
        not."""
        form, held = self._form, self._pieces.held
        assert form.keyed is not None
        if "".join(form.head[form.head.index(NAME) + 1 :]).strip():
            return True
        head = [held[: found.end]]
        heads = [[*head, form.keyed.opening]]
        if not self._tools or name in self._tools:
            heads.append([*head, form.closing])
        return (yield from self._pieces.find(*heads)) is not None

    def _read_object(self, start: int, *, is_untagged: bool = False) -> Steps[None]:
        """Read the call that is a JSON object, which begins here in the held text, whatever the
        order of its members. Raises _NoCallError for one that is none.

        is_untagged: another member, another name, or arguments before the name tell so."""
        pieces, call = self._pieces, _Object(start + 1, is_untagged)
        self._begin(is_sure=not is_untagged or bool(self._parts.num_calls))
        while (yield from self._read_member(call)):
            pass
        is_whole = pieces.held[call.place : call.place + 1] == "}"
        if not call.is_told:
            is_named = call.name is not None and _FUNCTION.fullmatch(call.name) is not None
            if not (is_whole and is_named) or (is_untagged and call.arguments is None):
                raise _NoCallError(call.place + is_whole)
            self._parts.begin_call(str(call.name), call.id)
            self._parts.add_arguments("{}" if call.arguments is None else call.arguments)
        pieces.take(call.place + is_whole)

    def _read_member(self, call: _Object) -> Steps[bool]:
        """Read the next member; return whether another one follows."""
        pieces = self._pieces
        call.place = yield from pieces.after_space(call.place)
        if pieces.held[call.place] == "{" and call.name is None and call.arguments is None:
            call.place += 1  # some templates show calls in two pairs of braces
            return True
        role = yield from self._read_key(call)
        if role is None:
            return False
        if role == ARGUMENTS and call.name is not None and not call.is_told:
            if not _FUNCTION.fullmatch(call.name):
                return False
            call.is_told = True
            self._begin()
            self._parts.begin_call(call.name, call.id)
            pieces.take(call.place)
            call.place = 0
            if pieces.held[0] == "{":
                yield from self._tell_object()
            else:
                end, missing = yield from pieces.value_end(0)
                self._parts.add_arguments(_as_object(pieces.take(end) + missing))
        else:
            end, missing = yield from pieces.value_end(call.place)
            text, call.place = pieces.held[call.place : end] + missing, end
            value = _loaded(text)
            if role == NAME:
                call.name = value if isinstance(value, str) else None
                if call.name is None or (call.is_untagged and not self._is_known(call.name)):
                    return False
                self._begin()
            elif role == ID and isinstance(value, str):
                call.id = value
            elif role == ARGUMENTS and call.arguments is None:
                call.arguments = _as_object(text)
        call.place = yield from pieces.after_space(call.place)
        goes_on = pieces.held[call.place] == ","
        call.place += goes_on
        return goes_on

    def _read_key(self, call: _Object) -> Steps[str | None]:
        """Return what the next member says, whose value then comes next; None where there is no
        member, or none of a call."""
        pieces, form = self._pieces, self._form
        if pieces.held[call.place] != '"':
            return None
        end, _ = yield from pieces.value_end(call.place)
        key, call.place = str(_loaded(pieces.held[call.place : end])), end
        role = _ROLES.get(key, "")
        if (found := _ID_KEY.search(form.call)) and key == found[1]:
            role = ID
        if form.call.startswith(f'{{"{NAME}"') and call.name is None:
            call.name, role = key, ARGUMENTS
        if (
            call.is_untagged
            and key != "type"
            and (not role or (role == ARGUMENTS and not call.name))
        ):
            return None
        call.place = yield from pieces.after_space(call.place)
        if pieces.held[call.place] != ":":
            return None
        call.place = yield from pieces.after_space(call.place + 1)
        return None if pieces.held[call.place] in ",:}]" else role

    def _is_known(self, name: str) -> bool:
        return not self._tools or name in self._tools

    def _tell_object(self) -> Steps[None]:
        """Tell arguments while they are written."""
        pieces, value = self._pieces, JsonEnd()
        while True:
            self._parts.add_arguments(pieces.take(value.find(pieces.held)))
            if value.is_complete:
                self._parts.add_arguments(value.missing)
                return
            yield from pieces.more()

    # What follows a call

    def _read_more_calls(self, *, is_untagged: bool = False) -> Steps[None]:
        """Read the calls that follow one, and leave out what the format has after them."""
        form, pieces = self._form, self._pieces
        while True:
            self._shows_rest = self._is_open = False
            if form.between is not None and not is_untagged:
                if (yield from self._read_call(form.between)):
                    continue
                self._shows_rest = self._is_open = False
            place = yield from pieces.after_space()
            if is_untagged:
                ending = yield from self._untagged_ending(place)
                if ending:
                    pieces.take(place + ending)
                    continue
            if form.closing.strip():
                closing = yield from pieces.find([form.closing])
                if closing is not None:
                    pieces.take(closing.end)
                    return
            if form.keyed is None:
                if pieces.held[place] in _LEFT:
                    pieces.take(place + 1)
                elif pieces.held[place] == "{" and form.is_object:
                    yield from self._read_object(place, is_untagged=is_untagged or form.is_bare)
                else:
                    return
                continue
            rest = pieces.held[place:]
            ends = ends_of(form)
            end = next((each for each in ends if rest.startswith(each)), "")
            if end:
                pieces.take(place + len(end))
            elif any(each.startswith(rest) for each in ends):
                yield from pieces.more()
            else:
                return

    def _untagged_ending(self, place: int) -> Steps[int]:
        """Return the length of what closes a call without tags; 0 where something else comes, such
        as the fence that opens another block."""
        pieces = self._pieces
        while True:
            rest = pieces.held[place:]
            if rest.startswith(FENCE) and len(rest) > len(FENCE):
                return len(FENCE) if rest[len(FENCE)].isspace() else 0
            end = next((each for each in _ENDS if rest.startswith(each)), "")
            if end or not any(each.startswith(rest) for each in (*_ENDS, FENCE)):
                return len(end) or int(rest[0] in _LEFT)
            yield from pieces.more()


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_object(text: str) -> str:
    """Return arguments that are no object as one, if they mean one: null, or JSON in a string."""
    value = _loaded(text)
    if isinstance(value, str):
        return value if value.strip() else "{}"
    return "{}" if value is None and text.strip() in ("null", "") else text
