"""What `edge-spec generate` writes of thoughts: a pipe gets none, a terminal a line."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from itertools import count

import pyte
import pytest

from edge_spec.cli.answering import AnswerWriter
from edge_spec.engine.results import Chunk, GenerationResult, Origin, Token
from edge_spec.text.parts.part import CallHead, PartKind

Written = Callable[..., str]
THOUGHT = "".join(f"I wonder about {number}.\n" for number in range(40)) + "\x1b[2J" + "x" * 200


def answer() -> Iterator[tuple[GenerationResult, Chunk]]:
    """Chunks, each with the result of all until then."""
    result = GenerationResult()
    pieces = [(PartKind.REASONING, THOUGHT[start : start + 7]) for start in range(0, 1000, 7)]
    for kind, text in [*pieces, (PartKind.TEXT, "The "), (PartKind.TEXT, "answer.")]:
        chunk = Chunk(text, (Token(1, text, Origin.PLAIN, kind=kind),), kind)
        result.add(chunk)
        result.reasoning_ms = 3140.0
        yield result, chunk
    call = Chunk('{"city": "Bern"}', (), PartKind.CALL, CallHead(0, "a", "weather"))
    result.add(call)
    yield result, call


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """written(out, stop_after=None): what is written to `out`, of all chunks or of the first."""
    for name, value in {"TERM": "xterm", "COLUMNS": "40", "LINES": "12"}.items():
        monkeypatch.setenv(name, value)

    def write(out: io.StringIO, stop_after: int | None = None) -> str:
        monkeypatch.setattr(sys, "stdout", out)
        return _written(out, stop_after)

    return write


def _written(out: io.StringIO, stop_after: int | None) -> str:
    writer = AnswerWriter(result := GenerationResult(), clock=count().__next__)
    for number, (now, chunk) in enumerate(answer()):
        vars(result).update(vars(now))
        writer.write(chunk)
        if number == stop_after:
            break
    writer.finish()
    return out.getvalue()


def screen(output: str) -> str:
    shown = pyte.Screen(40, 12)
    pyte.Stream(shown).feed(output.replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in shown.display).strip()


def test_a_pipe_gets_the_text_alone(written: Written) -> None:
    assert written(io.StringIO()) == "The answer.\n"


def test_a_terminal_shows_a_thought_until_it_ends(written: Written) -> None:
    output = written(Terminal())
    assert screen(output).splitlines() == ["thought for 3.1 s (143 tokens)", "The answer."]
    assert "I wonder about 39." in output and "\x1b[2J" not in output
