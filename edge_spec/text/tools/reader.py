"""Read text and calls from an answer in pieces of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from edge_spec.text.parts.answer_form import AnswerForm, AnswerReader
from edge_spec.text.parts.part import CallHead, EndedError, Part, PartKind, Steps, first_of
from edge_spec.text.tools.arguments import ANY, TEXT, Keyed, argument_types, as_json
from edge_spec.text.tools.call_format import ID, INDEX, NAME, TAG, CallFormat, marker_of, new_id

LATER_ID, WORD, KEY = "$LATER_ID", "$WORD", "$KEY"
_SLOTS = {
    NAME: r"[a-zA-Z0-9_.-]{1,128}+",
    **dict.fromkeys((ID, LATER_ID, WORD), r"[a-zA-Z0-9_.:/-]{1,128}+"),
    INDEX: r"[0-9]{1,9}+",
    KEY: r"(?:(?!</)[^\n]){1,128}?",
}
_SPACE = r"\s{0,200}+"
_CLOSING = {"[": "]", "{": "}", "(": ")"}
Types = Mapping[str | None, frozenset[str]]


# What a call begins with: literals, placeholders, tuples of alternative texts, and what may be
# missing.
Head = Sequence[Any]


class _Maybe(tuple[Any, ...]):
    """Pieces of a head that may be missing."""


class _Until(str):
    """A placeholder for a text without these signs."""


@lru_cache(maxsize=1024)
def _patterns(head: tuple[Any, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns, with any spacing: of a head, and of a text that may still become one."""
    return re.compile(_pattern(head, "")), re.compile(_pattern(head, r"|\Z"))


def _pattern(head: Head, end: str) -> str:
    """end: what each sign may be in place of itself."""

    def spelled(text: str) -> str:
        signs = [re.escape(sign) for sign in text if not sign.isspace()]
        return "".join(f"{_SPACE}(?:{sign}{end})" for sign in signs)

    pattern = ""
    for piece in head:
        if isinstance(piece, _Maybe):
            pattern += f"(?:{_pattern(piece, end)})?"
        elif isinstance(piece, _Until):
            pattern += f"{_SPACE}(?:([^{re.escape(piece)}]{{1,128}}+){end})"
        elif isinstance(piece, tuple):
            pattern += f"(?:{'|'.join(map(spelled, piece))})"
        elif piece in _SLOTS:
            group = "?:" if piece == WORD else f"?P<{piece[1:]}>"
            pattern += f"{_SPACE}(?:({group}{_SLOTS[piece]}){end})"
        else:
            pattern += spelled(piece)
    return pattern


class CallSteps(AnswerReader):
    """Adds text and calls; drops whitespace between calls and after the last one."""

    def __init__(self, answer: AnswerForm) -> None:
        self._num_calls = 0
        self._ids: set[str] = set()
        self._gap: list[Part] | None = None  # whitespace since the last call; None: text followed
        super().__init__(answer)

    def _show(self, length: int) -> None:
        if length:
            self._add(PartKind.TEXT, self._take(length))

    def _join(self, part: Part) -> None:
        if part.kind is PartKind.TEXT and self._gap is not None:
            self._gap.append(part)
            if part.text.isspace():
                return
            gap, self._gap = self._gap, None
            for each in gap:
                super()._join(each)
        else:
            super()._join(part)

    def _begin_call(self, name: str, id: str | None = None) -> None:
        """id: as written; replaced if the answer used it before."""
        if not id or id in self._ids:
            id = new_id()
        self._ids.add(id)
        self._gap = []
        self._add(PartKind.CALL, "", CallHead(self._num_calls, id, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(PartKind.CALL, text)

    def _find(self, *heads: Head) -> Steps[re.Match[str] | None]:
        patterns = [_patterns(tuple(head)) for head in heads]
        while True:
            for whole, _ in patterns:
                if found := whole.match(self._held):
                    return found
            if not any(begun.fullmatch(self._held) for _, begun in patterns):
                return None
            yield from self._more()

    def _value_end(
        self, place: int = 0, quote: str = "", *, closing: str = "", tells: bool = False
    ) -> Steps[tuple[int, str]]:
        """Return where the value ends, and what is missing to close it.

        JSON also ends before a "<" outside of strings: a tag after a forgotten brace. quote: for
        non-JSON values, besides ' and ". closing: of the enclosing object, whose end is returned.
        tells: report arguments as they are read.
        """
        quotes, ends = ((quote, '"', "'"), ",)}]<") if quote else (('"',), ",}]< \t\r\n")
        nested, within = list(closing), ""  # closing brackets; the string's quote
        is_begun = bool(closing)
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


_PYTHON_TAGS = ("", "<|python_start|>", "<|python_tag|>")  # before Llama's calls

# What models write around calls without the format's tags.
_FENCE = "```"
_NAMES = ("tool_call", "function_call", "tools", "tool", "response", "json", "JSON", "xml")
_TAGS = tuple(f"<{name}>" for name in _NAMES)
_ENDS = [f"</{name}>" for name in _NAMES]
_LEFT = ("}", "]", ",", ";", ")")  # surplus signs after a call
_FENCES = (_FENCE, f"{_FENCE}json", f"{_FENCE}xml")
_STARTS = (_FENCE, *_TAGS, "\n{", "\n[{")
# A call as a JSON object. Models trained on several formats mix their keys, and some templates show
# doubled braces.
_QUOTE, _NO_ID = ("", '"'), ("null", '""')
_OBJECT = (
    ("{", "[{", "{{", "[{{"),
    _Maybe(('"type":"', WORD, '",')),
    _Maybe(('"tool_call_id":', _QUOTE, WORD, _QUOTE, ",")),
    _Maybe(('"id":', _NO_ID, ",")),
    _Maybe(('"id":', _QUOTE, ID, _QUOTE, ",")),
    _Maybe(('"type":"', WORD, '",')),
    *('"', ("name", "tool_name"), '":"', NAME, '"'),
    _Maybe((',"id":', _NO_ID)),
    _Maybe((',"id":', _QUOTE, LATER_ID, _QUOTE)),
)
_ARGUMENTS = (',"', ("arguments", "parameters"), '":')


class CallReader(CallSteps):
    """Splits an answer into text and calls of a format. A would-be call without a name stays text,
    so no output is lost.

    Small models often leave tags out, so JSON with a known function's name and arguments counts as
    a call at the beginning of the answer, a line or a code block. Arguments written one by one are
    reported as JSON: unquoted strings as they come, other values when complete.
    """

    def __init__(self, answer: AnswerForm) -> None:
        """answer: with a `CallFormat`, and the tools if known."""
        self._form = form = cast(CallFormat, answer.calls)
        self._keyed = form.keyed or Keyed()
        # What may end a call, in order: signs, then tags.
        closing = form.closing.strip()
        self._ends = (*closing.partition("<")[0], *TAG.findall(closing))
        self._tools = {tool["function"]["name"]: tool for tool in answer.tools}
        self._markers = [marker_of(opening) for opening in form.openings]
        self._reads_untagged = form.is_named and bool(answer.tools)
        self._is_in_code = False
        # If the answer ends here, the held text is text, a cut call, or neither.
        self._within: PartKind | None = PartKind.TEXT
        super().__init__(answer)

    def _read_rest(self) -> Steps[None]:
        try:
            yield from self._read_first()
            while True:
                self._within = PartKind.TEXT
                yield from self._read_next()
        except EndedError:
            self.is_cut = self._within is PartKind.CALL
            if self._within is PartKind.TEXT:
                self._show(len(self._held))

    def _begin(self, *, is_sure: bool = True) -> None:
        """Enter a call; if it is cut, it is not shown as text."""
        self._within = PartKind.CALL if is_sure else PartKind.TEXT

    # Text, and where calls begin in it

    def _read_first(self) -> Steps[None]:
        """In some formats, the whole answer is calls or text."""
        if self._form.is_bare and self._form.keyed is not None:
            openings = [tag + self._form.opening for tag in _PYTHON_TAGS]
            yield from self._read_calls(openings)
        elif self._form.is_bare or self._reads_untagged:
            yield from self._read_untagged()

    def _read_next(self) -> Steps[None]:
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
        if not self._is_in_code and (yield from self._read_untagged()):
            return
        length = 1
        if self._held.startswith(_FENCE):
            while self._held == _FENCE:
                yield from self._more()
            length = len(_FENCE)
            self._is_in_code = not self._is_in_code or self._held[length].isalpha()
        self._show(length)

    def _read_untagged(self) -> Steps[bool]:
        own = tuple(each for each in _TAGS if each in self._markers)
        others = tuple(each for each in (*_TAGS, *_PYTHON_TAGS) if each not in own)
        openings: list[Head] = [[("", *_FENCES), others], [_FENCES, own]]
        is_call = yield from self._read_object(*openings[: 1 + bool(own)], is_known=True)
        self._begin(is_sure=is_call)
        if is_call:
            yield from self._read_more_calls(is_untagged=True)
        return is_call

    def _read_calls(self, openings: Sequence[str]) -> Steps[bool]:
        form = self._form
        for opening in openings:
            self._begin(is_sure=not form.is_bare)
            is_inner = form.keyed is not None and opening != form.opening
            is_known = form.is_bare or is_inner
            if (yield from self._read_call(opening, is_known=is_known)):
                yield from self._read_more_calls()
                return True
        self._begin(is_sure=False)
        return False

    # Calls

    def _read_call(self, opening: str, *, is_known: bool = False) -> Steps[bool]:
        """Return False without a call. is_known: only of known functions. If only the name marks a
        call, an argument must follow, or the call's end if the function is known."""
        form, keyed = self._form, self._form.keyed
        if form.is_named:
            return (yield from self._read_object([opening]))
        is_open = keyed is not None and not form.after_name.strip()
        ends = ["{"] if keyed is None else [""]
        if is_open:
            ends = [self._keyed.opening, form.closing]
        found = yield from self._find(*([opening, *form.head, each] for each in ends))
        if found is None:
            return False
        name, end = found["NAME"], found.end("NAME") if is_open else found.end()
        has_arguments = self._held[end:].lstrip().startswith(self._keyed.opening.strip())
        is_known = is_known or (is_open and not has_arguments and bool(self._tools))
        if is_known and name not in self._tools:
            return False
        self._begin()
        if keyed is None:
            self._take(end - len("{"))
            yield from self._read_value(name, found.groupdict().get(ID[1:]))
        else:
            self._take(end)
            self._begin_call(name)
            yield from self._read_arguments(argument_types(self._tools.get(name)))
        return True

    def _read_object(self, *openings: Head, is_known: bool = False) -> Steps[bool]:
        """Read a JSON object as a call. is_known: only a known function with arguments; other JSON
        becomes text as early as possible."""
        if not is_known:
            if (yield from self._find(*openings)) is None:
                return False
            self._begin()
        heads = [[*opening, *_OBJECT] for opening in openings]
        found = yield from self._find(*heads)
        if found is None or (is_known and self._tools and found["NAME"] not in self._tools):
            return False
        self._begin()
        ends = [[*head, *_ARGUMENTS] for head in heads]
        ends += [] if is_known else [[*head, ("}", "<")] for head in heads]
        found = yield from self._find(*ends)
        if found is None:
            return False
        name, id = found["NAME"], found["ID"] or found["LATER_ID"]
        end = found.end()
        if found[0].endswith(":"):
            self._take((yield from self._after_space(end)))
            yield from self._read_value(name, id)
            yield from self._read_object_end()
        else:  # a tag may follow instead of the closing brace
            self._take(end - found[0].endswith("<"))
            self._begin_call(name, id)
            self._add_arguments("{}")
        return True

    def _read_object_end(self) -> Steps[None]:
        """Drop the rest of an object after its arguments."""
        if more := (yield from self._find([',"'])):
            place, _ = yield from self._value_end(more.end() - 1, closing="}")
        else:
            place = yield from self._after_space()
            place += self._held[place] == "}"
        self._take(place)

    def _read_value(self, name: str, id: str | None = None) -> Steps[None]:
        self._begin_call(name, id)
        is_object = self._held[0] == "{"
        end, missing = yield from self._value_end(tells=is_object)
        text = self._take(end) + missing
        self._add_arguments(text if is_object else _as_object(text))

    # What follows a call

    def _read_more_calls(self, *, is_untagged: bool = False) -> Steps[None]:
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
                    self._take(closing.end())
                    return
            if left:
                self._take(place + left)
                continue
            if not form.is_named or self._held[place] != "{":
                return
            self._begin()
            if not (yield from self._read_object([], is_known=is_untagged or form.is_bare)):
                return

    def _left_after_call(self, place: int, *, is_untagged: bool) -> Steps[int]:
        """Return the length of a call's leftovers; 0 for anything else, such as a fence that opens
        a block."""
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
        keyed, names = self._keyed, set[str]()
        while (key := (yield from self._read_key(is_first=not names))) is not None:
            allowed = types.get(key) or types.get(None) or (ANY if keyed.quote else TEXT)
            is_new = key not in names
            if is_new:
                self._add_arguments(f"{', ' if names else '{'}{as_json(key)}: ")
            names.add(key)
            # A repeated argument is dropped.
            tell = self._add_arguments if is_new else lambda text: None
            if keyed.quote:
                self._take((yield from self._after_space()))
                end, _ = yield from self._value_end(0, keyed.quote)
                tell(keyed.meant_literal(self._take(end), allowed))
            else:
                yield from self._read_bare(allowed, tell)
        self._add_arguments("}" if names else "{}")

    def _read_key(self, *, is_first: bool) -> Steps[str | None]:
        """Return the name of the next argument, and drop what surrounds it; None after the last."""
        keyed, comma = self._keyed, self._keyed.comma.strip()
        key = _Until(keyed.colon.strip() + self._ends[0]) if keyed.quote else KEY
        colon, space = keyed.colon, keyed.colon[len(keyed.colon.rstrip()) :]
        # A model may leave out the second of two tags.
        colons = (colon, next(iter(TAG.findall(colon)), colon.strip()[0]))
        ends = self._ends
        while True:
            self._take((yield from self._after_space()))
            if comma and not is_first and self._held.startswith(comma):
                self._take(len(comma))
                self._take((yield from self._after_space()))
            if self._held.startswith(ends):
                return None
            if any(each.startswith(self._held) for each in ends):
                yield from self._more()
                continue
            for each in colons:
                found = yield from self._find([keyed.opening, key, each])
                name = found[1].strip("\"' \t\r\n") if found else ""
                if found is None or not name:
                    continue
                self._take(found.end())
                if space and not keyed.quote:
                    while not self._held:
                        yield from self._more()
                    self._take(len(space) if self._held.startswith(space) else 0)
                return name
            self._take(1)  # nothing else belongs between arguments
            ends = ends[:1] if keyed.quote else ends  # other brackets may be of a value

    def _read_bare(self, types: frozenset[str], tell: Callable[[str], None]) -> Steps[None]:
        closing = self._keyed.closing.rstrip()
        marks, streams = (closing, closing.lstrip()), types == TEXT
        lead = closing.removesuffix(marks[1])
        call_ends = (lead + self._ends[0], self._ends[0])
        if streams:
            tell('"')
        try:
            while True:
                place, end = first_of(marks, self._held)
                while end and "string" not in types and _is_in_text(self._held[:place]):
                    start = place + len(end)
                    place, end = first_of(marks, self._held[start:])
                    place += start
                if end:
                    break
                if streams:
                    told, _ = first_of(call_ends, self._held[:place])
                    tell(as_json(self._take(told))[1:-1])
                yield from self._more()
        except EndedError:  # the model may have closed the call but not the value
            place, end = first_of(call_ends, self._held)
            if not end:
                raise
        value = self._take(place)
        tell(f'{as_json(value)[1:-1]}"' if streams else self._keyed.meant(value, types))
        self._take(len(end) if end in marks else 0)


def _is_in_text(text: str) -> bool:
    """Return True if the beginning of JSON breaks off in a string."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_object(text: str) -> str:
    """Convert arguments that mean an object: null, or JSON in a string."""
    value = _loaded(text)
    if isinstance(value, str):
        return value if value.strip() else "{}"
    return "{}" if value is None and text.strip() in ("null", "") else text
