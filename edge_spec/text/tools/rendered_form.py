"""Finds the form of calls whose arguments are JSON in what a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from edge_spec.text.template_probes import ARGUMENTS, CALLED
from edge_spec.text.tools.json_form import JsonForm
from edge_spec.text.tools.literals import Piece, Slot
from edge_spec.text.tools.part_list import IdStyle

_INDENT = re.compile(r" {8,}")  # of a template's own lines, which it does not mean to write


@dataclass(frozen=True)
class RenderedCalls:
    """What a template writes for an answer, from where the model begins to where its turn ends.

    one: of one call. two: of two calls; None where it takes one. ids: of these calls.
    """

    one: str
    two: str | None
    ids: tuple[str, ...]


def form_in(rendered: RenderedCalls, ids: IdStyle) -> JsonForm | None:
    """Returns the form; None where the calls are not a name and a JSON object."""
    two = None if rendered.two is None else _spans(rendered.two, rendered.ids)
    if rendered.two is not None and two is not None and len(two) == 2:
        text, (first, second) = rendered.two, two
        between: str | None = text[first[1] : second[0]]
    else:
        text, spans = rendered.one, _spans(rendered.one, rendered.ids)
        if len(spans) != 1:
            return None
        first = second = spans[0]
        between = None
    call = _pieces(text[slice(*first)], rendered.ids)
    first_index = 0
    if between is not None:
        other = _pieces(text[slice(*second)], rendered.ids)
        call, number = _numbered(call, other)
        first_index = number or 0
    if Slot.NAME not in call or Slot.ARGUMENTS not in call:
        return None
    between = None if between is None else _INDENT.sub("", between)
    opening, closing = text[: first[0]].lstrip(), text[second[1] :]
    if opening.endswith("functions.") and call[:3] == (Slot.NAME, ":", Slot.INDEX):
        ids = IdStyle.NAMED  # what the model calls its calls, also where results are shown
    return JsonForm(opening, call, between, _INDENT.sub("", closing), ids, first_index)


def _spans(text: str, ids: tuple[str, ...]) -> list[tuple[int, int]]:
    """Returns where the calls are: objects with the name in them, or from the name or the id to the
    end of the arguments."""
    found: list[tuple[int, int]] = []
    for start, end in _objects(text):
        after = found[-1][1] if found else 0
        named = [text.rfind(word, after, start) for word in (CALLED, *ids)]
        around = _object_around(text, after, start, end)
        if around is not None:
            found.append(around)
        elif named[0] >= 0:
            found.append((min(place for place in named if place >= 0), end))
    return found


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Yields where the arguments stand."""
    end = 0
    for brace in re.finditer(r"\{", text):
        if brace.start() >= end and (span := _value(text, brace.start())) is not None:
            value, stop = span
            if value == ARGUMENTS:
                end = stop
                yield brace.start(), end


def _object_around(text: str, after: int, start: int, end: int) -> tuple[int, int] | None:
    """Returns where the innermost object with the arguments and the name is."""
    for place in reversed(
        [after + brace.start() for brace in re.finditer(r"\{", text[after:start])]
    ):
        span = _value(text, place)
        if span is not None and span[1] > end and f'"{CALLED}"' in text[place : span[1]]:
            return place, span[1]
    return None


def _value(text: str, start: int) -> tuple[object, int] | None:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _pieces(text: str, ids: tuple[str, ...]) -> tuple[Piece, ...]:
    """Takes a call apart."""
    ((start, end),) = _objects(text)
    return (*_slots(text[:start], ids), Slot.ARGUMENTS, *_slots(text[end:], ids))


def _slots(text: str, ids: tuple[str, ...]) -> Iterator[Piece]:
    named = {CALLED: Slot.NAME, **dict.fromkeys(ids, Slot.ID)}
    for part in re.split(f"({'|'.join(map(re.escape, named))})", text):
        if part:
            yield named.get(part, part)


def _numbered(
    call: tuple[Piece, ...], other: tuple[Piece, ...]
) -> tuple[tuple[Piece, ...], int | None]:
    """Finds where calls are numbered, in which alone two of them differ: the pieces, and the first
    number."""
    pieces: list[Piece] = []
    number = None
    for piece, next_ in zip(call, other, strict=False):
        if isinstance(piece, Slot) or piece == next_ or isinstance(next_, Slot):
            pieces.append(piece)
            continue
        parts, others = re.split(r"(\d+)", piece), re.split(r"(\d+)", next_)
        for part, changed in zip(parts, others, strict=False):
            if part == changed:
                pieces += [part] if part else []
            elif part.isdigit() and changed == str(int(part) + 1):
                number = int(part)
                pieces.append(Slot.INDEX)
    return tuple(_joined(pieces)), number


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined = pieces[:1]
    for before, piece in pairwise(pieces):
        if isinstance(before, str) and isinstance(piece, str):
            joined[-1] = f"{joined[-1]}{piece}"
        else:
            joined.append(piece)
    return joined
