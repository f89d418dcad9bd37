"""Turns what is to be shown into text for a terminal, in which nothing can command the terminal."""

from __future__ import annotations

import io
import sys

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

# Control characters, and those that turn the direction of the text after them (Boucher and
# Anderson 2021, Trojan Source). U+2400 is the picture of U+0000, and so on.
_VISIBLE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), 0x61C, *range(0x202A, 0x202F)), "\ufffd"),
    **dict.fromkeys(range(0x2066, 0x206A), "\ufffd"),
}
_LEAST_WIDTH = 8


def harmless(text: str) -> str:
    """`text` with visible characters for those that could command a terminal; newlines and tabs
    stay. Model output is not to be trusted, nor are names in files."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def dim(text: str) -> Text:
    return Text(harmless(text), "dim")


def paint(shown: RenderableType, width: int) -> str:
    """`shown` in lines of at most `width` cells, with escape sequences for its styles and for
    nothing else; with NO_COLOR they have no colours."""
    return _painted(shown, width, styled=True)


def plain(shown: RenderableType, width: int = 80) -> str:
    """`shown` without escape sequences; a str is not wrapped."""
    if isinstance(shown, str):
        return harmless(shown) + "\n"
    return _painted(shown, width, styled=False)


def bar_character() -> str:
    """Returns the bars of charts: a block, where standard output can print one."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return "\u2588" if encoding.lower().startswith("utf") else "#"


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
    # Whatever `shown` is made of, its text passes here. A link would be a sequence of its own.
    safe = [
        Segment(harmless(text), style and style.update_link(None))
        for text, style, control in rendered
        if not control
    ]
    with console.capture() as captured:
        console.print(Segments(safe), end="")
    return captured.get()
