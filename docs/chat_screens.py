"""Pictures of `edge-spec chat` for the docs: the real program in a terminal of its own.

    python docs/chat_screens.py DIRECTORY

Writes SVG files of what the terminal shows after each step of SCRIPT. Needs pyte, and a system with
pseudo-terminals.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS = 88, 34
FOOTER = "| smollm2"  # is there when nothing runs
TIMEOUT_S = 60.0
_DIM, _GREY = 2, 90
# Name of the picture, what is typed, and what a line of the screen has at the end of it.
SCRIPT = (
    (
        "chat",
        "Write a Python function that adds two numbers, then one that multiplies them.",
        ("tokens/s", FOOTER),
    ),
    ("chat-tokens", "/tokens", ("right draft tokens of",)),
)


class Answering(pyte.Screen):
    """Tells where the cursor is when asked, as a terminal does."""

    def __init__(self, reply: Callable[[str], None]) -> None:
        super().__init__(COLUMNS, ROWS)
        self._reply = reply

    def write_process_input(self, data: str) -> None:
        self._reply(data)

    def select_graphic_rendition(self, *attrs: int, **given: bool) -> None:
        """Shows what is dim, which pyte does not know, as grey."""
        super().select_graphic_rendition(*(_GREY if each == _DIM else each for each in attrs))


class Terminal:
    def __init__(self, arguments: list[str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.screen = Answering(self.type)
        self._stream = pyte.ByteStream(self.screen)
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        self._process = subprocess.Popen(
            ["edge-spec", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, *expected: str) -> None:
        """Reads until a line has all of these. Raises TimeoutError where none gets them."""
        while not any(all(each in line for each in expected) for line in self.screen.display):
            if not select.select([self._master], [], [], TIMEOUT_S)[0]:
                raise TimeoutError("\n".join([f"no {expected!r} in", *self.screen.display]))
            self._stream.feed(os.read(self._master, 65536))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._master)

    def picture(self, path: Path) -> None:
        """Writes an SVG file of the screen."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        for row in range(ROWS):
            line = Text(no_wrap=True, end="\n")
            for column in range(COLUMNS):
                cell = self.screen.buffer[row][column]
                line.append(cell.data, style_of(cell))
            console.print(line)
        svg = console.export_svg(title="edge-spec chat", theme=SVG_EXPORT_THEME)
        path.write_text(re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL), encoding="utf-8")


def style_of(cell: pyte.screens.Char) -> Style:
    names = {"brown": "yellow", "brightbrown": "bright_yellow"}

    def colour(name: str) -> str | None:
        if name == "default":
            return None
        if re.fullmatch("[0-9a-f]{6}", name):
            return f"#{name}"
        return names.get(name, re.sub("^bright(?=[a-z])", "bright_", name))

    return Style(
        color=colour(cell.fg),
        bgcolor=colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Greedy, so that the pictures show the same answers when they are made again.
    terminal = Terminal(["chat", "--max-tokens", "160", "--temperature", "0"])
    try:
        terminal.until("/help lists the commands")
        terminal.until(FOOTER)
        for name, typed, expected in SCRIPT:
            terminal.type(f"{typed}\r")
            terminal.until(typed[:40])
            terminal.until(*expected)
            terminal.until(FOOTER)
            terminal.picture(directory / f"{name}.svg")
    finally:
        terminal.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
