"""The conversation in a real terminal: what is typed into a pty, and what its screen then shows."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

fcntl = pytest.importorskip("fcntl", reason="needs a system with pseudo-terminals")
import pty  # noqa: E402
import struct  # noqa: E402
import termios  # noqa: E402

import pyte  # noqa: E402

CHILD = Path(__file__).with_name("scripted_chat.py")
TIMEOUT_S = 60.0
CTRL_C, ENTER, ALT_ENTER = "\x03", "\r", "\x1b\r"

IDLE = "| scripted"  # in the footer, once the answer has ended
REPEATED = "one two three, " * 8
ANSWERS = {
    "hello": "Hi **there**!",
    "evil": "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1A \u202egnirts",
    "list": "# Fruit\n\n- apple\n- pear\n\n```python\nprint(1)\n```\n\nLast line",
    "slow": REPEATED,
    "slow list": "First paragraph.\n\nSecond paragraph.",
    "repeat": REPEATED,
    "think": f"<think>\nFirst {REPEATED}\n\nThen \x1b[2J\n</think>\n\nThe **answer**.",
}
THOUGHT_LINE = re.compile(r"thought for \d+\.\d s \((\d+) tokens\)")


class Screen(pyte.Screen):
    """Answers the terminal's questions, such as where the cursor is."""

    def __init__(self, columns: int, rows: int, reply: Callable[[str], None]) -> None:
        super().__init__(columns, rows)
        self._reply = reply

    def write_process_input(self, data: str) -> None:
        self._reply(data)


class Tty:
    """A chat in a terminal of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], directory: Path, master: int, pace: int
    ) -> None:
        self.process = process
        self.directory = directory
        self.raw = b""
        self._master = master
        self._pace = pace
        self._size = (100, 40)
        self._screen = Screen(*self._size, self.type)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, text: str) -> None:
        self.type(text + ENTER)

    def release(self, rounds: int) -> None:
        """Lets a slow answer go on."""
        os.write(self._pace, b"." * rounds)

    def ends_after(self, step: Callable[[], object]) -> int:
        """Again and again, since nobody knows when the chat is far enough; the exit status."""
        ends_at = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < ends_at, self.text
            with suppress(OSError):  # it has ended
                step()
            self._read(0.05)
        return self.process.returncode

    def resize(self, columns: int, rows: int) -> None:
        """As a window does: the size is set, and the system sends SIGWINCH."""
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """Without the empty lines above the footer."""
        return "\n".join(line for line in self.lines if line)

    @property
    def cells(self) -> list[list[Any]]:
        rows = range(self._screen.lines)
        return [[self._screen.buffer[row][i] for i in range(self._screen.columns)] for row in rows]

    def until(self, *expected: str, gone: str | None = None) -> None:
        """Reads until all of the texts are on the screen and `gone` is not."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (all(each in self.text for each in expected) and (gone or "\0") not in self.text):
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), f"no {expected} on the screen:\n{self.text}"

    def ends(self) -> int:
        """Reads to the end; the exit status."""
        while self._read(TIMEOUT_S):
            pass
        return self.process.wait(TIMEOUT_S)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other side is closed
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Any]:
    """Starts a chat; called with environment variables."""
    opened: list[Any] = []
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(ANSWERS), "utf-8")

    def start(**environment: str) -> Tty:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        paced, pace = os.pipe()
        clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        clean |= {"TERM": "xterm-256color", "EDGE_SPEC_CACHE": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, str(CHILD), str(answers), str(paced)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            pass_fds=[paced],
            cwd=tmp_path,
            env={**clean, **environment},
            start_new_session=True,
        )
        os.close(slave)
        os.close(paced)
        footer = () if environment.get("TERM") == "dumb" else ("draft suffix",)
        opened.append((process, master, pace))
        tty = Tty(process, tmp_path, master, pace)
        tty.until("/help lists the commands", *footer)
        return tty

    yield start
    for process, master, pace in opened:
        os.close(pace)  # lets a waiting model go on
        process.kill()
        process.wait()
        os.close(master)


def test_an_answer_is_formatted_and_the_footer_tells_its_figures(chat: Any) -> None:
    tty = chat()
    tty.enter("hello")
    tty.until("Hi there!", "tokens/s", "draft suffix", IDLE)
    assert " MB" in tty.text or sys.platform != "linux"
    assert "**" not in tty.text
    tty.enter("list")
    tty.until("apple", "print(1)", "Last line")
    tty.enter("/quit")
    assert tty.ends() == 0


def test_sequences_in_an_answer_do_not_reach_the_terminal(chat: Any) -> None:
    tty = chat()
    tty.enter("evil")
    tty.until("\u241b]0;owned\u2407\u241b[2J\u241b[31mred\ufffd1A \ufffdgnirts")
    assert b"\x1b]" not in tty.raw and b"[31m" not in tty.raw.replace("\u241b[31m".encode(), b"")
    tty.enter("/tokens")
    tty.until("written without a draft token")
    tty.enter("/plain on")
    tty.enter("/retry")
    tty.until("shown as text")
    tty.enter("/quit")
    assert tty.ends() == 0
    assert b"\x1b]" not in tty.raw and b"\x07" not in tty.raw and b"\xc2\x9b" not in tty.raw


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_thought_becomes_a_line_and_is_shown_when_asked_for(
    chat: Any, environment: dict[str, str]
) -> None:
    tty = chat(**environment)
    tty.enter("think")
    tty.until("The", "answer", "thought for")
    if not environment:
        tty.until("/thoughts shows it", IDLE)
    [count] = THOUGHT_LINE.findall(tty.text)
    assert int(count) == len(ANSWERS["think"].partition("The **")[0])
    assert "First one" not in tty.text and "think>" not in tty.text
    tty.enter("/thoughts")
    tty.until("First one two three", "Then \u241b[2J")
    assert len(THOUGHT_LINE.findall(tty.text)) == 2
    tty.enter("/tokens")
    tty.until("answer", "written without a draft token")
    tty.enter("/quit")
    assert tty.ends() == 0


def test_what_is_written_stays_above_while_typing_goes_on(chat: Any) -> None:
    tty = chat()
    tty.enter("slow list")
    tty.until("Ctrl-C stops")
    tty.release(9)
    tty.until("First par")
    tty.type("my next ")
    tty.release(22)
    tty.until("First paragraph.", "Second par", "> my next")
    tty.type("question")
    tty.until("> my next question")
    tty.release(20)
    tty.until("Second paragraph.", IDLE)
    assert tty.text.count("First paragraph.") == tty.text.count("Second paragraph.") == 1


def test_ctrl_c_stops_an_answer_and_keeps_what_came(chat: Any) -> None:
    tty = chat()
    tty.enter("slow list")
    tty.release(9)
    tty.until("First par")
    tty.type(CTRL_C)
    tty.until("Stopping")
    tty.release(1)
    tty.until("First para", IDLE)
    tty.enter("/save talk.json")
    tty.until("2 messages saved")
    tty.enter("hello")
    tty.until("Hi there!")
    tty.enter("/quit")
    assert tty.ends() == 0


def test_ctrl_c_drops_a_line_and_at_the_second_time_leaves(chat: Any) -> None:
    tty = chat()
    tty.type("unwanted")
    tty.until("> unwanted")
    tty.type(CTRL_C)
    tty.until(gone="unwanted")
    tty.type(CTRL_C)
    tty.until("again")
    tty.type(CTRL_C)
    assert tty.ends() == 0


def test_the_drafter_changes_in_the_middle_of_an_answer(chat: Any) -> None:
    tty = chat(NO_COLOR="1")
    tty.enter("slow")
    tty.release(20)
    tty.until("accepted", "one two three, one")  # the suffix drafter knows what comes
    tty.enter("/draft none")
    tty.until("Speculation: off.", "draft none")
    tty.release(200)
    tty.until(IDLE)
    tty.enter("/stats")
    tty.until("rounds were plain", " off ")
    tty.enter("/tokens")
    tty.until("right draft tokens of: suffix", "[o][n][e]")
    assert {side for row in tty.cells for cell in row for side in (cell.fg, cell.bg)} == {"default"}
    marked = tty.text.rpartition("/tokens")[2].partition("plain ")[0]
    assert marked.rstrip().endswith("three,")  # those of the end are no draft tokens any more
    tty.enter("/draft nonsense")
    tty.until("no drafter called")
    tty.enter("/draft auto")
    tty.until("Speculation: auto.", "draft auto")


def test_a_message_waits_for_the_end_of_the_answer_before_it(chat: Any) -> None:
    tty = chat()
    tty.enter("slow list")
    tty.until("Ctrl-C stops")
    tty.enter("hello")
    tty.until("Goes when this has ended", "> hello")
    tty.release(60)
    tty.until("Second paragraph.", "> hello", "Hi there!")
    assert tty.text.index("Second") < tty.text.index("> hello")


def test_a_window_that_changes_its_size_in_an_answer_keeps_it(chat: Any) -> None:
    tty = chat()
    tty.enter("slow list")
    tty.release(10)
    tty.until("First par")
    for columns, rows in ((40, 12), (25, 8), (120, 30)):
        tty.resize(columns, rows)
        tty.release(1)
        tty.until("First par", "> ".rstrip())
    tty.release(60)
    tty.until("First paragraph.", "Second paragraph.", IDLE)


def test_several_lines_are_one_message(chat: Any) -> None:
    tty = chat()
    tty.type("first" + ALT_ENTER + "second")
    tty.until("> first", "second")
    tty.type("\x1b[200~ and\nthird\x1b[201~")  # a bracketed paste
    tty.until("second and", "third")
    tty.type(ENTER)
    tty.enter("/save talk.json")
    tty.until("2 messages saved")
    saved = json.loads((tty.directory / "talk.json").read_text("utf-8"))
    assert saved["messages"][0]["content"] == "first\nsecond and\nthird"


@pytest.fixture
def opening(chat: Any) -> Tty:
    """In the middle of a download that takes for ever."""
    tty: Tty = chat()
    tty.enter("/model endless")
    tty.release(3)
    tty.until("Downloading 50%")
    return tty


def test_ctrl_c_stops_what_opens_a_model(opening: Tty) -> None:
    opening.type(CTRL_C)
    opening.until("Stopping")
    opening.release(1)  # the next report of progress
    opening.until("stopped. All is as it was.")
    opening.enter("hello")
    opening.until("Hi there!")


def test_leaving_stops_what_opens_a_model(opening: Tty) -> None:
    opening.enter("/quit")
    assert opening.ends_after(lambda: opening.release(1)) == 0


def test_behind_quit_ctrl_c_leaves_an_answer_that_does_not_end(chat: Any) -> None:
    tty = chat()
    tty.enter("slow")
    tty.release(1)
    tty.until("Ctrl-C stops")
    tty.enter("/quit")
    assert tty.ends_after(lambda: tty.type(CTRL_C)) == -signal.SIGINT


def test_a_failure_is_one_line_and_the_conversation_goes_on(chat: Any) -> None:
    tty = chat()
    tty.enter("fail")
    tty.until("edge-spec: the device is gone. Try another one.")
    tty.enter("hello")
    tty.until("Hi there!")
    tty.enter("/save talk.json")
    tty.until("2 messages saved")
    assert "Traceback" not in tty.text


def test_a_dumb_terminal_gets_lines(chat: Any) -> None:
    tty = chat(TERM="dumb")
    tty.enter("evil")
    tty.until("\u241b[2J", "gnirts")
    tty.enter("/quit")
    assert tty.ends() == 0
    assert b"\x1b" not in tty.raw
