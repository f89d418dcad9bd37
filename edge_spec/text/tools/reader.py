"""Reads text and calls out of an answer, which comes in pieces of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge_spec.text.parts.part import (
    CallHead,
    EndedError,
    PartKind,
    StepReader,
    Steps,
    after_space,
    first_of,
)
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.arguments import (
    ANY,
    TEXT,
    Keyed,
    argument_types,
    as_json,
    unescaped,
)
from edge_spec.text.tools.call_shape import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    TAG,
    CallShape,
    marker_of,
    new_id,
)

_SLOTS = {
    NAME: re.compile(r"[a-zA-Z0-9_.-]{1,128}"),
    ID: re.compile(r"[a-zA-Z0-9_.:/-]{1,128}"),
    INDEX: re.compile(r"[0-9]{1,9}"),
}
_MAX_HEAD = 2000  # characters of a call before its arguments
_CLOSING = {"[": "]", "{": "}", "(": ")"}
Types = Mapping[str | None, frozenset[str]]


class Found(NamedTuple):
    end: int
    values: Mapping[str, str]


class CallSteps(StepReader):
    """Tells text and calls. White space between calls and after the last one is left out, however
    it comes in pieces."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._ids: set[str] = set()
        self._gap: str | None = None  # white space since the last call; None: text came after it
        super().__init__()

    def _add_text(self, text: str) -> None:
        if self._gap is not None:
            text = self._gap + text
            self._gap = None if text.strip() else text
        if self._gap is None and text:
            self._add(PartKind.TEXT, text)

    def _begin_call(self, name: str, id: str | None = None) -> None:
        """id: as the model wrote it. One that an earlier call of the answer has is replaced."""
        if not id or id in self._ids:
            id = new_id()
        self._ids.add(id)
        self._gap = ""
        self._add(PartKind.CALL, "", CallHead(self._num_calls, id, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(PartKind.CALL, text)

    def _find(self, *heads: Sequence[str]) -> Steps[Found | None]:
        """Return where one of these heads ends that the held text begins with, however it is
        spaced. A head is made of literals and slots."""
        while True:
            found = [_matched(head, self._held) for head in heads]
            ended = next((each for each in found if isinstance(each, Found)), None)
            if ended is not None or True not in found:
                return ended
            yield from self._more()

    def _value_end(
        self, place: int = 0, quote: str = "", *, tells: bool = False
    ) -> Steps[tuple[int, str]]:
        """Return where the value ends that begins here, and what is missing to close it.

        JSON ends before "<" outside of a text, too, where the tag after a call begins: the model
        has forgotten a brace. quote: of values that are no JSON, beside ' and ". tells: tell
        arguments while they are read.
        """
        quotes, ends = ((quote, '"', "'"), ",)}]<") if quote else (('"',), ",}]< \t\r\n")
        nested, within = list[str](), ""  # what closes each array that is open, and the text
        is_begun = False
        while True:
            ahead = self._held[place : place + max(1, len(quote))]
            if not ahead or (quote.startswith(ahead) and ahead != quote):
                if tells:
                    place -= len(self._held)
                    self._add_arguments(self._take(len(self._held)))
                yield from self._more()
                continue
            sign, may_open = ahead[0], bool(nested) or not is_begun
            if within and not ahead.startswith(within):
                place += 2 if sign == "\\" and len(within) == 1 else 1
            elif within:
                place, within = place + len(within), ""
                if not nested:
                    return place, ""
            elif may_open and (opened := next(filter(ahead.startswith, quotes), "")):
                place, within = place + len(opened), opened
            elif nested and sign in _CLOSING.values():
                place += 1
                nested.pop()
                if not nested:
                    return place, ""
            elif (not nested and sign in ends) or (not quote and sign == "<"):
                return place, "".join(reversed(nested))
            else:
                place += 1
                nested += [_CLOSING[sign]] if may_open and sign in _CLOSING else []
            is_begun = True


_FUNCTION = re.compile(r"[a-zA-Z0-9_.-]+")
# Models that were trained on several formats take the words of another one.
_ROLES = {"name": NAME, "tool_name": NAME, "arguments": ARGUMENTS, "parameters": ARGUMENTS}
_ID_KEY = re.compile(r'"(\w+)": "\$ID"')
_PYTHON_TAGS = ("", "<|python_start|>", "<|python_tag|>")  # before calls of Llama

# What models write around a call whose tags they have left out.
_FENCE = "```"
_NAMES = ("tool_call", "function_call", "tools", "tool", "response", "json", "JSON", "xml")
_TAGS = tuple(f"<{name}>" for name in _NAMES)
_ENDS = [f"</{name}>" for name in _NAMES]
_LEFT = ("}", "]", ",", ";", ")")  # what a model may write too much of after a call
_BRACES = ("{", "[{")
_FENCES = ("", _FENCE, f"{_FENCE}json", f"{_FENCE}xml")
_OPENINGS = [
    f"{fence}{tag}{brace}" for fence in _FENCES for tag in ("", *_TAGS) for brace in _BRACES
]
_FIRST_OPENINGS = [*_OPENINGS, *(f"<|python_tag|>{brace}" for brace in _BRACES)]
_STARTS = (_FENCE, *_TAGS, "\n{", "\n[{")


class _NoCallError(Exception):
    """What was read is text, and no call."""

    def __init__(self, length: int) -> None:
        self.length = length


class CallReader(CallSteps):
    """Splits an answer into text and calls of a format. What looks like a call and has no name
    stays text, so nothing that the model wrote is lost.

    Many a small model leaves the tags out: a JSON object with the name and the arguments of a
    function that may be called is a call all the same where it begins the answer, a line or a block
    of code. Arguments that are written one by one are told as JSON: texts of formats without quotes
    while they are written, other values when they are complete.
    """

    def __init__(self, form: CallShape, tools: Tools) -> None:
        """tools: those that may be called; none where they are not known."""
        self._form = form
        self._keyed = form.keyed or Keyed()
        # What may end a call, in order: signs, and tags.
        closing = form.closing.strip()
        self._ends = (*closing.partition("<")[0], *TAG.findall(closing))
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._markers = [marker_of(opening) for opening in form.openings]
        self._reads_untagged = form.is_named and bool(tools)
        self._is_in_code = False
        # Where the answer ends here, what is held is text, or a call is cut, or neither.
        self._within: PartKind | None = PartKind.TEXT
        super().__init__()

    def _read(self) -> Steps[None]:
        steps = self._read_first
        try:
            while True:
                self._within = PartKind.TEXT
                try:
                    yield from steps()
                except _NoCallError as error:
                    self._is_in_code |= self._held.lstrip().startswith(_FENCE)
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
        if self._held.startswith(_FENCE):
            while self._held == _FENCE:
                yield from self._more()
            length = len(_FENCE)
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
        self._begin(is_sure=not is_untagged or bool(self._num_calls))
        found: dict[str, str] = {}  # values as JSON, by what they are
        place, is_told = start + 1, False
        while True:
            place = yield from self._after_space(place)
            if self._held[place] == "{" and not found:
                place += 1  # some templates show calls in two pairs of braces
                continue
            role, place = yield from self._read_key(place, found, is_untagged)
            if role is None:
                break
            name = _loaded(found.get(NAME, ""))
            if role == ARGUMENTS and isinstance(name, str) and not is_told:
                self._begin_named(name, found)
                yield from self._tell_value(place)
                place, is_told = 0, True
            else:
                end, missing = yield from self._value_end(place)
                found.setdefault(role, self._held[place:end] + missing)
                place = end
                if role == NAME and not self._is_name(found[NAME], is_untagged):
                    break
            place = yield from self._after_space(place)
            if self._held[place] != ",":
                break
            place += 1
        is_whole = self._held[place : place + 1] == "}"
        if not is_told:
            name = _loaded(found.get(NAME, ""))
            is_call = is_whole and isinstance(name, str) and self._is_name(found[NAME], is_untagged)
            if not is_call or (is_untagged and ARGUMENTS not in found):
                raise _NoCallError(place + is_whole)
            self._begin_named(str(name), found)
            self._add_arguments(_as_object(found.get(ARGUMENTS, "{}")))
        self._take(place + is_whole)

    def _read_key(
        self, place: int, found: dict[str, str], is_untagged: bool
    ) -> Steps[tuple[str | None, int]]:
        """Return what the member says that begins here, and where its value does; None where there
        is no member, or none of a call."""
        form = self._form
        if self._held[place] != '"':
            return None, place
        end, _ = yield from self._value_end(place)
        key = str(_loaded(self._held[place:end]))
        colon = yield from self._after_space(end)
        role = _ROLES.get(key, "")
        if (own := _ID_KEY.search(form.call)) and key == own[1]:
            role = ID
        if form.call.startswith(f'{{"{NAME}"') and NAME not in found:
            found[NAME], role = json.dumps(key), ARGUMENTS
        is_other = not role or (role == ARGUMENTS and NAME not in found)
        if self._held[colon] != ":" or (is_untagged and key != "type" and is_other):
            return None, end
        place = yield from self._after_space(colon + 1)
        return (None if self._held[place] in ",:}]" else role), place

    def _is_name(self, written: str, is_untagged: bool) -> bool:
        """Return True for the name of a function, as JSON. A call has begun with it."""
        name = _loaded(written)
        is_known = not (is_untagged and self._tools) or name in self._tools
        if not isinstance(name, str) or not is_known or not _FUNCTION.fullmatch(name):
            return False
        self._begin()
        return True

    def _begin_named(self, name: str, found: Mapping[str, str]) -> None:
        id = _loaded(found.get(ID, ""))
        self._begin()
        self._begin_call(name, id if isinstance(id, str) else None)

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
        ends = (*ends, *_ENDS, _FENCE) if is_untagged else ends
        while True:
            rest = self._held[place:]
            end = next((each for each in ends if rest.startswith(each)), "")
            if end == _FENCE and len(rest) > len(_FENCE):
                return len(_FENCE) if rest[len(_FENCE)].isspace() else 0
            if end != _FENCE and (end or not any(each.startswith(rest) for each in ends)):
                return len(end)
            yield from self._more()

    # Arguments that are written one by one

    def _read_arguments(self, types: Types) -> Steps[None]:
        """Read up to the end of the call."""
        keyed, names = self._keyed, set[str]()
        while (yield from self._goes_on(is_first=not names)):
            key = yield from self._name()
            if key is None:
                continue
            allowed = types.get(key) or types.get(None) or (ANY if keyed.quote else TEXT)
            is_new = key not in names
            if is_new:
                self._add_arguments(f"{', ' if names else '{'}{as_json(key)}: ")
            names.add(key)
            # An argument that was there before is left out.
            tell = self._add_arguments if is_new else lambda text: None
            if keyed.quote:
                self._take((yield from self._after_space()))
                end, _ = yield from self._value_end(0, keyed.quote)
                tell(_quoted(self._take(end), keyed, allowed))
            else:
                yield from self._raw(allowed, tell)
        self._add_arguments("}" if names else "{}")

    def _goes_on(self, *, is_first: bool) -> Steps[bool]:
        """Return True at the name of an argument, False at the end of the call."""
        comma = self._keyed.comma.strip()
        while True:
            self._take((yield from self._after_space()))
            if comma and not is_first and self._held.startswith(comma):
                self._take(len(comma))
                self._take((yield from self._after_space()))
            if self._held.startswith(self._ends):
                return False
            if any(each.startswith(self._held) for each in self._ends):
                yield from self._more()
                continue
            opening = yield from self._find([self._keyed.opening])
            if opening is not None:
                self._take(opening.end)
                return True
            self._take(1)  # nothing is between arguments

    def _name(self) -> Steps[str | None]:
        """Return the name of the argument, None where there is none."""
        keyed, ending = self._keyed, self._ends[0]
        first, last = keyed.colon.strip()[:1], keyed.colon.rstrip()[-1]
        while (place := self._held.find(first)) < 0 and ending not in self._held:
            yield from self._more()
        end = self._held.find(ending)
        if end >= 0 and (place < 0 or end < place):
            self._take(end)
            return None
        key = self._take(place).strip().strip("\"'")
        found = yield from self._find([keyed.colon])
        if found is None:  # the value begins after the first sign of the same kind
            while last not in self._held:
                yield from self._more()
        self._take(self._held.find(last) + 1 if found is None else found.end)
        space = keyed.colon[len(keyed.colon.rstrip()) :]
        if space and not keyed.quote:
            while not self._held:
                yield from self._more()
            self._take(len(space) if self._held.startswith(space) else 0)
        return key

    def _raw(self, types: frozenset[str], tell: Callable[[str], None]) -> Steps[None]:
        """Read a value that is written as it is, up to what closes it."""
        keyed, ending = self._keyed, self._ends[0]
        core = keyed.closing.strip()
        lead = keyed.closing[: len(keyed.closing) - len(keyed.closing.lstrip())]
        streams, may_end, searched = types == TEXT, False, 0
        if streams:
            tell('"')
        try:
            while True:
                place = self._held.find(core, max(0, searched - len(core)))
                while place >= 0 and "string" not in types and _is_in_text(self._held[:place]):
                    place = self._held.find(core, place + 1)
                if place >= 0:
                    break
                if streams and not may_end:
                    ends = (lead + core, core, lead + ending, ending)
                    tell(as_json(self._take(first_of(ends, self._held)[0]))[1:-1])
                    may_end = ending in self._held
                searched = len(self._held)
                yield from self._more()
        except EndedError:  # it may be that the model has closed the call and not the value
            place, core = self._held.find(ending), ""
            if place < 0:
                raise
        value = self._held[:place]
        value = value.removesuffix(lead) if lead else value
        self._take(place + len(core))
        tell(f'{as_json(value)[1:-1]}"' if streams else keyed.meant(value, types))


def _quoted(text: str, keyed: Keyed, types: frozenset[str]) -> str:
    """Return a literal as JSON."""
    quote = next((each for each in (keyed.quote, '"', "'") if text.startswith(each)), "")
    if not quote:
        return keyed.meant(text, types)
    text = text.removeprefix(quote).removesuffix(quote)
    text = unescaped(text) if len(quote) == 1 else text
    return as_json(text) if "string" in types else keyed.meant(as_json(text), types)


def _is_in_text(text: str) -> bool:
    """Return True if JSON that begins so is within a text."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def _matched(head: Sequence[str], text: str) -> Found | bool:
    """Return True if the text may still become the head, False if it cannot."""
    place = 0
    values: dict[str, str] = {}
    for piece in head:
        slot = _SLOTS.get(piece)
        for part in [piece] if slot else "".join(piece.split()):
            place = after_space(text, place)
            if place > _MAX_HEAD:
                return False
            if place == len(text):
                return True
            if slot is None:
                if text[place] != part:
                    return False
                place += 1
                continue
            found = slot.match(text, place)
            if found is None or found.end() == len(text):
                return found is not None
            values[part], place = found.group(), found.end()
    return Found(place, values)


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
