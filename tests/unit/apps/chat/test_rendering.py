"""What `edge-spec chat` prints: harmless, whole, and within its width."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from edge_spec.apps.chat import terminal
from edge_spec.apps.chat.rendering import AnswerView, harmless, paint, plain, shown_text
from edge_spec.apps.chat.terminal import open_history
from edge_spec.text.parts.part import CallHead, PartKind

STYLES = re.compile("\x1b\\[[0-9;]*m")
MARKDOWN = """\
# Title

A *paragraph* with [a link](http://host/path) and
two lines.

- one
- two

  still two

```python
print("x")

y = 1
```

| a | b |
|---|---|
| 1 | 2 |

1. first
2. second
"""


def unstyled(painted: str) -> str:
    """Raises AssertionError where anything but styles is left that commands a terminal."""
    text = STYLES.sub("", painted)
    assert harmless(text) == text
    return text


@given(st.text())
@example("\x1b]0;title\x07 \x9b2J \x7f \u202e \r x\r\ny")
def test_nothing_that_is_shown_can_command_the_terminal(text: str) -> None:
    for shown in (text, Text(text), shown_text(text, False), shown_text(text, True)):
        unstyled(paint(shown, 40))
        assert harmless(plain(shown)) == plain(shown)


def test_control_characters_are_seen() -> None:
    assert harmless("a\x1b[2J\r\n\tb\x7f\x85\u2066") == "a\u241b[2J\n\tb\u2421\ufffd\ufffd"


def test_markdown_is_formatted_and_nothing_of_it_is_lost() -> None:
    shown = unstyled(paint(shown_text(MARKDOWN, False), 60))
    for kept in ("Title", "paragraph", "http://host/path", "still two", 'print("x")', "second"):
        assert kept in shown
    assert "# Title" not in shown and "*paragraph*" not in shown and "```" not in shown
    assert "A paragraph with a link (http://host/path) and" in map(str.rstrip, shown.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "vector<int> and <b>bold</b>",
        "<div>\nblock\n</div>",
        "<think>hm</think>",
        "[name]: http://host/hidden",
        "![alt](http://host/image.png)",
        "<!-- comment -->",
        "[bold]not rich's markup[/bold] :smile:",
        "&lt;b&gt; \\*literal\\*",
    ],
)
def test_text_that_looks_like_markup_stays_visible(text: str) -> None:
    shown = unstyled(paint(shown_text(text, False), 80))
    words = re.findall("[a-z]{3,}", text.replace("&lt;", "").replace("&gt;", ""))
    assert all(word in shown for word in words)


@pytest.mark.parametrize(
    "text",
    [
        "> " * 2000 + "x",
        "> " * 12 + "x",
        "- " * 500 + "x",
        "- " * 7 + "x",
        "[" * 3000 + "x",
        "*" * 3000 + "x",
        "|" * 500 + "\n|-|\nx",
        "|a|b|\n|-|-|\n|" + "y" * 200 + "x|" + "z" * 200 + "|",
    ],
)
def test_text_made_to_break_a_renderer_is_shown_all_the_same(text: str) -> None:
    for width in (8, 20, 40):
        shown = unstyled(paint(shown_text(text, False), width))
        for letter in "xyz":
            assert shown.count(letter) >= text.count(letter)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks_are_finished_once_and_join_to_the_text(size: int) -> None:
    view, taken = AnswerView(), []
    for start in range(0, len(MARKDOWN), size):
        view.push(MARKDOWN[start : start + size])
        taken.append(view.take())
    taken.append(view.take_all())
    shown = "".join(unstyled(paint(block, 60)) for block in taken if block is not None)
    whole = unstyled(paint(shown_text(MARKDOWN, False), 60))
    assert shown.split() == whole.split()
    assert view.rest == ""


@pytest.mark.parametrize("is_plain", [False, True])
def test_thoughts_are_folded_where_they_end_and_calls_are_told_from_text(is_plain: bool) -> None:
    view, taken = AnswerView(is_plain, lambda: "thought for 2.0 s"), []
    for text, kind, call in (
        ("", PartKind.REASONING, None),  # a tag
        ("hid", PartKind.REASONING, None),
        ("den\n\n", PartKind.REASONING, None),
        ("I look ", PartKind.TEXT, None),
        ("it up.", PartKind.TEXT, None),
        ("hidden, too", PartKind.REASONING, None),
        ("", PartKind.CALL, CallHead(0, "a", "find\x1b[2J")),
        ('{"city": "Be', PartKind.CALL, None),
        ('rn"}', PartKind.CALL, None),
        ('{"', PartKind.CALL, CallHead(1, "b", "stop")),  # is cut
    ):
        view.push(text, kind, call)
        assert view.is_thinking == (kind is PartKind.REASONING)
        taken.append(view.take())
    taken.append(view.take_all())
    shown = "".join(unstyled(paint(block, 60)) for block in taken if block is not None)
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    told = ["Call of find\u241b[2J", "{", '  "city": "Bern"', "}", "Call of stop", '{"']
    assert lines == ["thought for 2.0 s", "I look it up.", "thought for 2.0 s", *told]


@pytest.mark.parametrize("width", [8, 20, 40])
def test_lines_fit_the_width_wide_characters_too(width: int) -> None:
    for text in ("x" * 300, "\u65e5\u672c\u8a9e" * 40, MARKDOWN, "caf\u00e9 \U0001f600 " * 30):
        lines = unstyled(paint(shown_text(text, False), width)).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_a_long_history_begins_anew(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(terminal, "_MAX_HISTORY_BYTES", 100)
    history = open_history()
    history.append_string("short")
    assert list(open_history().load_history_strings()) == ["short"]
    history.append_string("long " * 40)
    assert list(open_history().load_history_strings()) == []


def test_the_history_is_the_users_own_and_may_fail(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    history = open_history()
    history.append_string("a line\nof two \udc80")
    file = tmp_path / "cache" / "chat-history"
    assert file.stat().st_mode & 0o077 == 0 or os.name == "nt"
    assert list(open_history().load_history_strings()) == ["a line\nof two ?"]
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "occupied"))
    open_history().append_string("lost at the end")
