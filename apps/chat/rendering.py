"""What a terminal shows: text that cannot command it, and an answer as it grows."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown, TableElement
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from edge_spec import PartKind

if TYPE_CHECKING:
    from edge_spec.text.parts.part import CallHead

# Control characters, and those that change the text's direction (Boucher and Anderson 2021, Trojan
# Source). U+2400 is the picture of U+0000, and so on.
_VISIBLE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), 0x61C, *range(0x202A, 0x202F)), "\ufffd"),
    **dict.fromkeys(range(0x2066, 0x206A), "\ufffd"),
}
_LEAST_WIDTH = 8
_MOST_LEVELS = 16
_LEVEL_CELLS = 4  # most cells that a nesting level takes from the width
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
# These would hide link definitions and image addresses.
_PARSER.disable(["reference", "image"])
_FENCES = ("```", "~~~")


def harmless(text: str) -> str:
    """Replace characters that could command a terminal by visible ones. Trust neither model output
    nor names in files."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def dim(text: str) -> Text:
    return Text(harmless(text), "dim")


def paint(shown: RenderableType, width: int) -> str:
    """Return lines of at most `width` cells; the only escape sequences are styles."""
    return _painted(shown, width, styled=True)


def plain(shown: RenderableType, width: int = 80) -> str:
    """Return text without escape sequences. A str is not wrapped."""
    if isinstance(shown, str):
        return harmless(shown) + "\n"
    return _painted(shown, width, styled=False)


def _painted(shown: RenderableType, width: int, *, styled: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=max(width, _LEAST_WIDTH),
        force_terminal=styled,
        color_system="auto" if styled else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    rendered = console.render(Text(shown) if isinstance(shown, str) else shown)
    # All text passes here, whatever `shown` is. Links are removed: they are escape sequences.
    safe = [
        Segment(harmless(text), style and style.update_link(None))
        for text, style, control in rendered
        if not control
    ]
    with console.capture() as captured:
        console.print(Segments(safe), end="")
    return captured.get()


class AnswerView:
    """A growing answer. One thread pushes text while another takes blocks and draws the rest.

    A block is one of Markdown (paragraph, list, code), or a line if `is_plain`. A thought is one
    block, folded to a line once it has ended. A tool call is one block, too.
    """

    def __init__(self, is_plain: bool = False, fold: Callable[[], str] = lambda: "thought") -> None:
        """fold: returns the line to show for a finished thought."""
        self._is_plain = is_plain
        self._fold = fold
        self._lock = Lock()
        self._blocks: list[RenderableType] = []  # finished, before the rest, not yet taken
        self._kind = PartKind.TEXT  # of the rest
        self._call = ""  # name of the call whose arguments are in the rest
        self.rest = ""
        self._painted: tuple[str, int, int, PartKind] = "", 0, 0, PartKind.TEXT
        self._fragments: StyleAndTextTuples = []

    def push(self, text: str, kind: PartKind = PartKind.TEXT, call: CallHead | None = None) -> None:
        """call: given with the first piece of each call."""
        with self._lock:
            if kind is not self._kind or call is not None:
                self._end()
                self._kind, self._call = kind, call.name if call is not None else ""
            self.rest += text

    def take(self) -> RenderableType | None:
        """Take the finished blocks, which no further text can change."""
        with self._lock:
            if self._kind is PartKind.TEXT:
                last = self.rest.rfind("\n") + 1 if self._is_plain else finished_length(self.rest)
                block, self.rest = self.rest[:last], self.rest[last:]
                if block:
                    self._blocks.append(shown_text(block.removesuffix("\n"), self._is_plain))
            return self._taken()

    def take_all(self) -> RenderableType | None:
        """Take all that is left; None if that is only whitespace."""
        with self._lock:
            self._end()
            return self._taken()

    def _end(self) -> None:
        text, self.rest = self.rest, ""
        if self._call:
            self._blocks.append(shown_call(self._call, text))
        elif text.strip() and self._kind is PartKind.REASONING:
            self._blocks.append(dim(self._fold()))
        elif text.strip():
            self._blocks.append(shown_text(text, self._is_plain))
        self._kind, self._call = PartKind.TEXT, ""

    def _taken(self) -> RenderableType | None:
        blocks, self._blocks = self._blocks, []
        if len(blocks) < 2:
            return blocks[0] if blocks else None
        gap = [] if self._is_plain else [Text()]
        return Group(blocks[0], *(each for block in blocks[1:] for each in (*gap, block)))

    @property
    def is_thinking(self) -> bool:
        return self._kind is PartKind.REASONING

    def fragments(self, columns: int, rows: int) -> StyleAndTextTuples:
        """Return the last lines of the painted rest, at most `rows`."""
        kind, text = self._kind, self.rest
        if self._painted == (text, columns, rows, kind):
            return self._fragments
        end = _end_of(text, rows)
        shown = dim(end) if kind is PartKind.REASONING else shown_text(end, self._is_plain)
        lines = paint(shown, columns).rstrip("\n").split("\n")[-rows:]
        self._fragments = to_formatted_text(ANSI("\n".join(lines)))
        self._painted = text, columns, rows, kind
        return self._fragments


def shown_call(name: str, arguments: str) -> RenderableType:
    """Render a tool call, with its arguments indented if they are complete."""
    with suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    return Group(Text(harmless(f"Call of {name}"), "bold"), Text(harmless(arguments)))


def shown_text(text: str, is_plain: bool) -> RenderableType:
    safe = harmless(text)  # before wrapping, as replacements may differ in width
    return Text(safe) if is_plain else ShownMarkdown(safe)


def finished_length(text: str) -> int:
    """Return how many characters precede the last Markdown block, which more text may continue."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    if not starts or starts[-1] == 0:
        return 0
    return sum(map(len, text.split("\n")[: starts[-1]])) + starts[-1]


class FoldingTable(TableElement):
    """A table that breaks long words rather than cutting them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class ShownMarkdown(Markdown):
    """Markdown for a terminal that hides no part of the text. HTML and link addresses are shown as
    written, and lines break where the text's do."""

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
        # The parser drops what is nested too deeply, the renderer what has no width left.
        if self._depth > min(_MOST_LEVELS, options.max_width // _LEVEL_CELLS - 2):
            yield Text(self.markup)
            return
        try:
            yield from list(super().__rich_console__(console, options))
        except Exception:  # a model may write anything, and all of it must be shown
            yield Text(self.markup)


def _end_of(text: str, rows: int) -> str:
    """Return the last lines of a block; those of code stay code."""
    lines = text.split("\n")
    if len(lines) <= rows:
        return text
    opening = [lines[0]] if lines[0].startswith(_FENCES) else []
    return "\n".join([*opening, *lines[-rows:]])
