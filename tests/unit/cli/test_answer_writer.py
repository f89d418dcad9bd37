"""What `edge-spec generate` writes of thoughts: a pipe gets none, a terminal all of them."""

from __future__ import annotations

import io
import sys

import pyte
import pytest

from edge_spec.cli.answering import AnswerWriter
from edge_spec.engine.results import Chunk
from edge_spec.text.parts.part import CallHead, PartKind

CHUNKS = [
    Chunk("I wonder\n", (), PartKind.REASONING),
    Chunk("about [red]\x1b[2J.", (), PartKind.REASONING),
    Chunk("The ", (), PartKind.TEXT),
    Chunk("answer.", (), PartKind.TEXT),
    Chunk('{"city": "Bern"}', (), PartKind.CALL, CallHead(0, "a", "weather")),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(out: io.StringIO, monkeypatch: pytest.MonkeyPatch, num_chunks: int = 5) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out)
    writer = AnswerWriter()
    for chunk in CHUNKS[:num_chunks]:
        writer.write(chunk)
    writer.finish()
    return out.getvalue()


def screen(output: str) -> list[str]:
    shown = pyte.Screen(40, 12)
    pyte.Stream(shown).feed(output.replace("\n", "\r\n"))
    return [line.rstrip() for line in shown.display if line.strip()]


def test_a_pipe_gets_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(io.StringIO(), monkeypatch) == "The answer.\n"


def test_a_terminal_shows_the_thought_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    output = written(Terminal(), monkeypatch)
    assert screen(output) == ["I wonder", "about [red]?[2J.", "The answer."]
    assert "\x1b[2mI wonder" in output and "\x1b[2J" not in output


def test_a_thought_that_is_interrupted_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(Terminal(), monkeypatch, num_chunks=1).endswith("\n")
