"""Chat without lines that are drawn over: through pipes, or in a plain terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge_spec.apps.answering import Stop
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.apps.chat.repl import talk_in_lines
from edge_spec.engine.results import Chunk, GenerationResult, Origin, Token
from edge_spec.text.parts.part import PartKind

THOUGHT = Chunk("so", (Token(1, "so", Origin.PLAIN, kind=PartKind.REASONING),), PartKind.REASONING)
TEXT = Chunk("Yes\x1b.", (Token(2, "Yes\x1b.", Origin.PLAIN),))


@pytest.mark.parametrize(
    ("is_terminal", "as_json", "shown"),
    [
        (True, False, "Yes\N{SYMBOL FOR ESCAPE}.\nthought for 2.0 s (1 token)\n"),
        (False, False, "Yes\x1b.\n"),
        *((is_terminal, True, '{"turns": [1]}\n') for is_terminal in (True, False)),
    ],
)
def test_an_answer_is_printed(
    is_terminal: bool,
    as_json: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(text: str, on_chunk: Callable[[Chunk], None], *, again: bool) -> GenerationResult:
        result = GenerationResult(reasoning_ms=2000)
        for chunk in (THOUGHT, TEXT):
            result.add(chunk)
            on_chunk(chunk)
        return result

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    conversation: Any = SimpleNamespace(
        stop=Stop(), turns=[1], answer=answer, make_room=lambda text, again: None
    )
    talk_in_lines(cast(ChatConversation, conversation), as_json=as_json)
    out = capsys.readouterr().out
    assert out == shown
    assert not as_json or json.loads(out)
