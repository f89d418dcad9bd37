"""An answer as it grows: finished blocks to print for good, and the end that still changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from markdown_it import MarkdownIt
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table
from rich.text import Text

from edge_spec import PartKind
from edge_spec.apps.chat.paint import dim, harmless, paint

if TYPE_CHECKING:
    from edge_spec.text.parts.part import CallHead

_MOST_LEVELS = 16
_LEVEL_CELLS = 4  # at most, that a level takes of the width
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
# Definitions of links and addresses of images would disappear.
_PARSER.disable(["reference", "image"])
# Drawing competes with the model for the interpreter: at most this share of the time is drawn.
_SHARE = 0.05
_FENCES = ("```", "~~~")


class AnswerView:
    """Text is pushed by one thread while another takes blocks and shows the rest.

    Blocks are those of Markdown (paragraphs, lists, code), or with `is_plain` lines. A thought is
    one block, which appears once it has ended, folded to a line.
    """

    def __init__(self, is_plain: bool = False, fold: Callable[[], str] = lambda: "thought") -> None:
        """fold: gives the line for the thought that has ended."""
        self._is_plain = is_plain
        self._fold = fold
        self._lock = Lock()
        self._blocks: list[RenderableType] = []  # before the rest: finished, and not taken yet
        self._rest = ""
        self._call = ""  # the name of the call whose arguments the rest is
        self._thought = ""  # what is written of it
        self.is_thinking = False

    def push(self, text: str, kind: PartKind = PartKind.TEXT, call: CallHead | None = None) -> None:
        """call: with the first piece of each call."""
        with self._lock:
            if kind is PartKind.REASONING:
                self._end_text()
                self.is_thinking = True
                self._thought += text
                return
            self._end_thought()
            if kind is PartKind.TEXT and self._call:
                self._end_text()
            if call is not None:
                self._end_text()
                self._call = call.name
            self._rest += text

    def take(self) -> RenderableType | None:
        """The blocks that no further text can change; they are no longer part of the rest."""
        with self._lock:
            length = 0 if self._call else self._finished()
            block, self._rest = self._rest[:length], self._rest[length:]
            if block:
                self._blocks.append(shown_text(block.removesuffix("\n"), self._is_plain))
            return self._taken()

    def _finished(self) -> int:
        return self._rest.rfind("\n") + 1 if self._is_plain else finished_length(self._rest)

    def take_all(self) -> RenderableType | None:
        """All that is left; None where that is nothing but spaces."""
        with self._lock:
            self._end_thought()
            self._end_text()
            return self._taken()

    def _end_thought(self) -> None:
        if self._thought.strip():
            self._blocks.append(dim(self._fold()))
        self._thought, self.is_thinking = "", False

    def _end_text(self) -> None:
        text, self._rest = self._rest, ""
        name, self._call = self._call, ""
        if name:
            self._blocks.append(shown_call(name, text))
        elif text.strip():
            self._blocks.append(shown_text(text, self._is_plain))

    def _taken(self) -> RenderableType | None:
        blocks, self._blocks = self._blocks, []
        if len(blocks) < 2:
            return blocks[0] if blocks else None
        gap = [] if self._is_plain else [Text()]
        return Group(blocks[0], *(each for block in blocks[1:] for each in (*gap, block)))

    @property
    def rest(self) -> str:
        """Returns the text after the blocks, or the thought that is being written."""
        return self._thought if self.is_thinking else self._rest


def shown_call(name: str, arguments: str) -> RenderableType:
    """A call of a tool, its arguments one a line where they are complete."""
    with suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    return Group(Text(harmless(f"Call of {name}"), "bold"), Text(harmless(arguments)))


def shown_text(text: str, is_plain: bool) -> RenderableType:
    safe = harmless(text)  # here, too, so that lines are broken where they will be
    return Text(safe) if is_plain else ShownMarkdown(safe)


def finished_length(text: str) -> int:
    """Characters of `text` before its last Markdown block, which more text may continue."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    if not starts or starts[-1] == 0:
        return 0
    return sum(map(len, text.split("\n")[: starts[-1]])) + starts[-1]


class FoldingTable(TableElement):
    """A table in which long words are broken rather than cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class ShownMarkdown(Markdown):
    """Markdown as the terminal can show it: no part of the text is left out, HTML and addresses of
    links are shown as they are, and lines end where the text's do."""

    elements: ClassVar = {**Markdown.elements, "table_open": FoldingTable}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = text
        self.parsed = _PARSER.parse(text)
        self._depth = max((each.level for each in self.parsed if each.nesting == 1), default=0)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The parser leaves out what is too deep for it, the renderer what has no width left.
        if self._depth > min(_MOST_LEVELS, options.max_width // _LEVEL_CELLS - 2):
            yield Text(self.markup)
            return
        try:
            yield from list(super().__rich_console__(console, options))
        except Exception:  # text of a model may be of any form, and has to be shown
            yield Text(self.markup)


class Room(NamedTuple):
    columns: int
    rows: int
    is_plain: bool  # Markdown is shown as text
    is_thought: bool = False


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
        end = _end_of(text, room.rows)
        shown = dim(end) if room.is_thought else shown_text(end, room.is_plain)
        lines = paint(shown, room.columns)
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
