"""Reads text and calls out of an answer, which comes in pieces of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.text.parts.part import EndedError, PartKind, Steps, first_of
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import argument_types
from edge_spec.text.tools.call_shape import (
    ARGUMENTS,
    ID,
    NAME,
    TAG,
    CallShape,
    marker_of,
)
from edge_spec.text.tools.steps import Found, KeyedSteps

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
_LEFT = ("}", "]", ",", ";", ")")  # what a model may write too much of after a call
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


class CallReader(KeyedSteps):
    """Splits an answer into text and calls of a format. What looks like a call and has no name
    stays text, so nothing that the model wrote is lost.

    Many a small model leaves the tags out: a JSON object with the name and the arguments of a
    function that may be called is a call all the same where it begins the answer, a line or a block
    of code.
    """

    def __init__(self, form: CallShape, tools: Tools) -> None:
        """tools: those that may be called; none where they are not known."""
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._markers = [marker_of(opening) for opening in form.openings]
        self._reads_untagged = form.is_named and bool(tools)
        self._is_in_code = False
        # Where the answer ends here, what is held is text, or a call is cut, or neither.
        self._within: PartKind | None = PartKind.TEXT
        super().__init__(form)

    def _read(self) -> Steps[None]:
        steps = self._read_first
        try:
            while True:
                self._within = PartKind.TEXT
                try:
                    yield from steps()
                except _NoCallError as error:
                    self._is_in_code |= self._held.lstrip().startswith(FENCE)
                    self._show(error.length)
                steps = self._read_next
        except EndedError:
            self.is_cut = self._within is PartKind.CALL
            if self._within is PartKind.TEXT:
                self._show(len(self._held))

    def _show(self, length: int) -> None:
        self._add_text(self._take(length))

    def _begin(self, *, is_sure: bool = True) -> None:
        """A call has begun: nothing of it is text if it is cut."""
        self._within = PartKind.CALL if is_sure else PartKind.TEXT

    # Text, and where calls begin in it

    def _read_first(self) -> Steps[None]:
        """Of some formats, the whole answer is a call, or a list of some, or none of it."""
        if self._form.is_bare and self._form.keyed is not None:
            openings = [tag + self._form.opening for tag in _PYTHON_TAGS]
            yield from self._read_calls(openings)
        elif self._form.is_bare or self._reads_untagged:
            yield from self._read_untagged(_FIRST_OPENINGS)

    def _read_next(self) -> Steps[None]:
        """Read text up to calls, and these. Tags that are left after calls are no text."""
        starts = _STARTS if self._reads_untagged else ()
        starts = tuple(each for each in starts if each not in self._markers)
        while True:
            strays = TAG.findall(self._form.closing) if self._num_calls else []
            strays = [each for each in strays if each not in self._markers]
            place, marker = first_of([*self._markers, *starts, *strays], self._held)
            self._show(place + marker.startswith("\n"))
            if marker in strays:
                self._take(len(marker))
            elif marker:
                break
            else:
                yield from self._more()
        if marker in starts:
            yield from self._read_start()
        elif not (yield from self._read_calls(self._form.openings)):
            marker = max((m for m in self._markers if self._held.startswith(m)), key=len)
            self._show(len(marker))

    def _read_start(self) -> Steps[None]:
        """The held text begins with a fence, a tag that is none of the format's, or a brace."""
        if not self._is_in_code and (yield from self._read_untagged(_OPENINGS)):
            return
        length = 1
        if self._held.startswith(FENCE):
            while self._held == FENCE:
                yield from self._more()
            length = len(FENCE)
            self._is_in_code = not self._is_in_code or self._held[length].isalpha()
        self._show(length)

    def _read_untagged(self, openings: Sequence[str]) -> Steps[bool]:
        """Read calls without the format's tags, if one of these openings comes next, which end in
        their first brace."""
        own = tuple(self._markers)
        heads = [[each] for each in openings if not own or not each.startswith(own)]
        found = yield from self._find(*heads)
        if found is not None:
            yield from self._read_object(found.end - 1, is_untagged=True)
            yield from self._read_more_calls(is_untagged=True)
        return found is not None

    def _read_calls(self, openings: Sequence[str]) -> Steps[bool]:
        """Read calls, if one of these openings begins some."""
        form = self._form
        for opening in openings:
            self._begin(is_sure=not form.is_bare)
            is_known = form.is_bare or opening == form.inner_marker
            if (yield from self._read_call(opening, is_known=is_known)):
                yield from self._read_more_calls()
                return True
        self._begin(is_sure=False)
        return False

    # Calls

    def _read_call(self, opening: str, *, is_known: bool = False) -> Steps[bool]:
        """Return False for what is none. is_known: neither is one of a function that the model was
        not told of."""
        form = self._form
        head = [opening] if form.is_object else [opening, *form.head]
        found = yield from self._find(head)
        if found is None:
            return False
        name = found.values.get(NAME, "")
        if form.keyed is not None:
            if (is_known and name not in self._tools) or not (
                yield from self._is_call(name, found)
            ):
                return False
            self._take(found.end)
            self._begin()
            self._begin_call(name)
            yield from self._read_arguments(argument_types(self._tools.get(name)))
            return True
        place = yield from self._after_space(found.end)
        if self._held[place] != "{":
            return False
        if form.is_object:
            yield from self._read_object(place, is_untagged=form.is_bare)
            return True
        self._begin()
        self._begin_call(name, found.values.get(ID))
        yield from self._tell_value(place)
        return True

    def _is_call(self, name: str, found: Found) -> Steps[bool]:
        """Return True unless what follows a name has to tell that it is one of a call, and does
        not."""
        form, held = self._form, self._held
        assert form.keyed is not None
        if form.after_name.strip():
            return True
        head = [held[: found.end]]
        heads = [[*head, form.keyed.opening]]
        if not self._tools or name in self._tools:
            heads.append([*head, form.closing])
        return (yield from self._find(*heads)) is not None

    def _read_object(self, start: int, *, is_untagged: bool = False) -> Steps[None]:
        """Read the call that is a JSON object, which begins here in the held text, whatever the
        order of its members. Raises _NoCallError for one that is none.

        is_untagged: another member, another name, or arguments before the name tell so."""
        call = _Object(start + 1, is_untagged)
        self._begin(is_sure=not is_untagged or bool(self._num_calls))
        while (yield from self._read_member(call)):
            pass
        is_whole = self._held[call.place : call.place + 1] == "}"
        if not call.is_told:
            is_named = call.name is not None and _FUNCTION.fullmatch(call.name) is not None
            if not (is_whole and is_named) or (is_untagged and call.arguments is None):
                raise _NoCallError(call.place + is_whole)
            self._begin_call(str(call.name), call.id)
            self._add_arguments("{}" if call.arguments is None else call.arguments)
        self._take(call.place + is_whole)

    def _read_member(self, call: _Object) -> Steps[bool]:
        """Read the next member; return whether another one follows."""
        call.place = yield from self._after_space(call.place)
        if self._held[call.place] == "{" and call.name is None and call.arguments is None:
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
            self._begin_call(call.name, call.id)
            yield from self._tell_value(call.place)
            call.place = 0
        else:
            end, missing = yield from self._value_end(call.place)
            text, call.place = self._held[call.place : end] + missing, end
            value = _loaded(text)
            if role == NAME:
                call.name = value if isinstance(value, str) else None
                is_other = bool(self._tools) and call.name not in self._tools
                if call.name is None or (call.is_untagged and is_other):
                    return False
                self._begin()
            elif role == ID and isinstance(value, str):
                call.id = value
            elif role == ARGUMENTS and call.arguments is None:
                call.arguments = _as_object(text)
        call.place = yield from self._after_space(call.place)
        goes_on = self._held[call.place] == ","
        call.place += goes_on
        return goes_on

    def _read_key(self, call: _Object) -> Steps[str | None]:
        """Return what the next member says, whose value then comes next; None where there is no
        member, or none of a call."""
        form = self._form
        if self._held[call.place] != '"':
            return None
        end, _ = yield from self._value_end(call.place)
        key, call.place = str(_loaded(self._held[call.place : end])), end
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
        call.place = yield from self._after_space(call.place)
        if self._held[call.place] != ":":
            return None
        call.place = yield from self._after_space(call.place + 1)
        return None if self._held[call.place] in ",:}]" else role

    def _tell_value(self, place: int) -> Steps[None]:
        """Tell the arguments that begin here; those of an object while they are written."""
        self._take(place)
        is_object = self._held[0] == "{"
        end, missing = yield from self._value_end(tells=is_object)
        text = self._take(end) + missing
        self._add_arguments(text if is_object else _as_object(text))

    # What follows a call

    def _read_more_calls(self, *, is_untagged: bool = False) -> Steps[None]:
        """Read the calls that follow one, and leave out what the format has after them."""
        form = self._form
        while True:
            self._within = None
            if form.between is not None and not is_untagged:
                if (yield from self._read_call(form.between)):
                    continue
                self._within = None
            place = yield from self._after_space()
            left = yield from self._left_after_call(place, is_untagged=is_untagged)
            if form.closing.strip() and not (is_untagged and left):
                closing = yield from self._find([form.closing])
                if closing is not None:
                    self._take(closing.end)
                    return
            if left:
                self._take(place + left)
            elif form.is_object and self._held[place] == "{":
                yield from self._read_object(place, is_untagged=is_untagged or form.is_bare)
            else:
                return

    def _left_after_call(self, place: int, *, is_untagged: bool) -> Steps[int]:
        """Return the length of what is left of a call here; 0 where something else comes, such as
        the fence that opens another block."""
        ends = self._ends if self._form.keyed else _LEFT
        ends = (*ends, *_ENDS, FENCE) if is_untagged else ends
        while True:
            rest = self._held[place:]
            end = next((each for each in ends if rest.startswith(each)), "")
            if end == FENCE and len(rest) > len(FENCE):
                return len(FENCE) if rest[len(FENCE)].isspace() else 0
            if end != FENCE and (end or not any(each.startswith(rest) for each in ends)):
                return len(end)
            yield from self._more()


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
