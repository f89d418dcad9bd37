"""The end of an answer that is still being written, as the terminal shows it above the input."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text

from edge_spec.apps.chat.markdown import shown_text
from edge_spec.apps.chat.paint import paint

# Drawing competes with the model for the interpreter: at most this share of the time is drawn.
_SHARE = 0.05
_FENCES = ("```", "~~~")


class Room(NamedTuple):
    columns: int
    rows: int
    is_plain: bool  # Markdown is shown as text


class Tail:
    """Paints again only where it may, and shows the last painting until then."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._text = ""
        self._room: Room | None = None
        self._fragments: StyleAndTextTuples = []
        self._not_before = 0.0

    def fragments(self, text: str, room: Room) -> StyleAndTextTuples:
        """Returns at most `room.rows` lines, the last of what `text` is painted as."""
        begun = self._clock()
        is_longer = room == self._room and text.startswith(self._text)
        if is_longer and (text == self._text or begun < self._not_before):
            return self._fragments
        lines = paint(shown_text(_end_of(text, room.rows), room.is_plain), room.columns)
        last = lines.rstrip("\n").split("\n")[-room.rows :]
        self._fragments = to_formatted_text(ANSI("\n".join(last)))
        self._text, self._room = text, room
        now = self._clock()
        self._not_before = now + (now - begun) / _SHARE
        return self._fragments


def _end_of(text: str, rows: int) -> str:
    """The last lines of a block; those of code remain code."""
    lines = text.split("\n")
    if len(lines) <= rows:
        return text
    opening = [lines[0]] if lines[0].startswith(_FENCES) else []
    return "\n".join([*opening, *lines[-rows:]])
