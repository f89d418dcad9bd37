"""What `edge-spec chat` prints: harmless, whole, and within its width."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import fragment_list_to_text
from rich.cells import cell_len
from rich.text import Text

from edge_spec.apps.chat import keyboard
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.apps.chat.footer import Meter, footer
from edge_spec.apps.chat.keyboard import CommandCompleter, open_history
from edge_spec.apps.chat.markdown import AnswerView, Room, Tail, finished_length, shown_text
from edge_spec.apps.chat.paint import harmless, paint, plain
from edge_spec.engine.results import FinishReason, GenerationResult, Origin, Token
from edge_spec.engine.thought_line import cut_thought, thought_line
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


def test_an_empty_thought_is_not_told() -> None:
    view = AnswerView()
    for text, kind in (
        ("", PartKind.REASONING),
        ("\n", PartKind.REASONING),
        ("Yes", PartKind.TEXT),
    ):
        view.push(text, kind)
    assert unstyled(paint(view.take_all(), 20)).strip() == "Yes"


@pytest.mark.parametrize(
    ("milliseconds", "tokens", "line"),
    [
        (0.0, 1, "thought for 0.0 s (1 token)"),
        (3140.0, 120, "thought for 3.1 s (120 tokens)"),
        (59_960.0, 0, "thought for 60.0 s (0 tokens)"),
        (125_000.0, 2000, "thought for 2 min 5 s (2000 tokens)"),
    ],
)
def test_a_thought_is_told_in_one_line(milliseconds: float, tokens: int, line: str) -> None:
    thought = [Token(1, "", Origin.PLAIN, kind=PartKind.REASONING)] * tokens
    result = GenerationResult(reasoning="so", reasoning_ms=milliseconds, tokens=thought)
    assert thought_line(result) == line


@pytest.mark.parametrize(
    ("reason", "text", "told"),
    [
        ("length", "", "the limit of 1 tokens was reached within the thought: --max-tokens"),
        ("stop", " ", "the model ended its answer within the thought: --reasoning off"),
        ("cancelled", "", None),
        ("length", "So", None),
    ],
)
def test_an_answer_without_text_says_why(reason: str, text: str, told: str | None) -> None:
    thought = Token(1, "", Origin.PLAIN, kind=PartKind.REASONING)
    result = GenerationResult(text, "so", tokens=[thought], finish_reason=FinishReason(reason))
    found = cut_thought(result)
    assert found is told if told is None else found is not None and found.startswith(told)
    result.reasoning = ""
    assert cut_thought(result) is None


def test_a_block_is_finished_when_another_begins() -> None:
    assert finished_length("one\ntwo") == 0
    assert finished_length("one\n\nt") == len("one\n\n")
    assert finished_length("```\ncode\n\nmore") == 0
    assert finished_length("- a\n- b\n\n") == 0
    assert finished_length("") == finished_length("\n\n") == 0


def test_unformatted_lines_are_finished_at_their_end() -> None:
    view = AnswerView(is_plain=True)
    view.push("# one\ntw")
    assert unstyled(paint(view.take(), 40)).strip() == "# one"
    assert view.take() is None and view.rest == "tw"


@pytest.mark.parametrize("width", [8, 20, 40])
def test_lines_fit_the_width_wide_characters_too(width: int) -> None:
    for text in ("x" * 300, "\u65e5\u672c\u8a9e" * 40, MARKDOWN, "caf\u00e9 \U0001f600 " * 30):
        lines = unstyled(paint(shown_text(text, False), width)).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = re.compile("\x1b\\[[0-9;]*\\b(?:3[0-9]|4[0-9]|9[0-7])[;m]")
    assert coloured.search(paint(shown_text(MARKDOWN, False), 60))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(paint(shown_text(MARKDOWN, False), 60))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown_tail(tail: Tail, text: str, room: Room) -> list[str]:
    return fragment_list_to_text(tail.fragments(text, room)).splitlines()


def test_of_a_long_block_the_last_lines_are_shown_and_code_stays_code() -> None:
    room, code = Room(40, 5, is_plain=False), "```\n" + "".join(f"*{i}*\n" for i in range(99))
    lines = [line.strip() for line in shown_tail(Tail(), code, room)]
    assert len(lines) <= 5 and "*98*" in lines
    assert len(shown_tail(Tail(), "word " * 500, room)) == 5


def test_drawing_takes_no_more_than_its_share_of_the_time() -> None:
    class Slow(Clock):
        reading = 0

        def __call__(self) -> float:
            self.now += 0.01 if self.reading % 2 else 0.0  # a painting takes 10 ms
            self.reading += 1
            return self.now

    clock, room = Slow(), Room(40, 5, is_plain=True)
    tail = Tail(clock)
    assert shown_tail(tail, "a", room) == ["a"]
    clock.reading = 0
    assert shown_tail(tail, "ab", room) == ["a"]  # too soon
    clock.now += 0.21
    clock.reading = 0
    assert shown_tail(tail, "abc", room) == ["abc"]
    clock.reading = 0
    assert shown_tail(tail, "bc", room) == ["bc"]  # what was printed for good is not shown twice
    clock.reading = 0
    assert shown_tail(tail, "bc", Room(2, 5, is_plain=True)) == ["bc"]


def test_the_rate_is_that_of_the_last_second() -> None:
    clock = Clock()
    meter = Meter(clock)
    assert meter.per_second is None
    clock.now = 5.0  # the prompt's time
    meter.observe(1)
    assert meter.per_second is None
    for _ in range(10):
        clock.now += 0.05
        meter.observe(2)
    assert meter.per_second == pytest.approx(40)
    for _ in range(40):
        clock.now += 0.05
        meter.observe(1)
    assert meter.per_second == pytest.approx(20, rel=0.06)
    meter.restart()
    assert meter.per_second is None


def test_the_footer_keeps_what_fits(make_engine: Any, remembers_all: Any) -> None:
    talk = ChatConversation(
        lambda *_, **__: make_engine(remembers_all()), "test", True, {}, None, {}
    )
    talk.last = GenerationResult()
    talk.last.stats.predicted_n, talk.last.stats.predicted_ms = 50, 1000.0
    talk.last.stats.plain_per_second = 25.0
    whole = footer(talk, Meter(), "", 200)
    assert whole.startswith("50 tokens/s | 2.00x | draft auto | ") and whole.endswith(
        "exact | test"
    )
    for width in range(len(whole)):
        shown = footer(talk, Meter(), "", width)
        assert whole.startswith(shown) and (len(shown) <= width or shown == "50 tokens/s")


def test_the_footer_tells_how_far_a_long_prompt_is_read(
    make_engine: Any, remembers_all: Any
) -> None:
    make = lambda *_, **__: make_engine(remembers_all(2048))  # noqa: E731
    talk = ChatConversation(make, "test", True, {"max_tokens": 2}, None, {"temperature": 0})
    talk.running, talk.reading = GenerationResult(), "40%"
    assert footer(talk, Meter(), "", 200).startswith("reading 40% | ")
    talk.answer("a" * 1400, lambda chunk: None)
    assert talk.reading == "100%"


@pytest.fixture
def completer(make_engine: Any, remembers_all: Any) -> CommandCompleter:
    make = lambda *_, **__: make_engine(remembers_all())  # noqa: E731
    return CommandCompleter(ChatConversation(make, "test", False, {}, None, {}))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/st", ["/stats"]),
        ("/draft no", ["none"]),
        ("/draft suffix,look", ["lookahead"]),
        ("/exact ", ["on", "off"]),
        ("/stats ", []),
        ("hello /st", []),
        ("/nonsense x", []),
    ],
)
def test_commands_and_their_choices_are_completed(
    completer: CommandCompleter, typed: str, offered: list[str]
) -> None:
    found = completer.get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == offered


def test_paths_are_completed(completer: CommandCompleter, tmp_path: Any) -> None:
    (tmp_path / "talk.json").touch()
    document = Document(f"/load {tmp_path}/ta")
    found = list(completer.get_completions(document, CompleteEvent()))
    assert [completion.text for completion in found] == ["lk.json"]


def test_a_long_history_loses_its_older_half(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(keyboard, "_MAX_HISTORY_BYTES", 1000)
    history = open_history()
    for index in range(40):
        history.append_string(f"line {index}\nof two")
    kept = list(open_history().load_history_strings())
    assert kept == [f"line {index}\nof two" for index in range(39, 39 - len(kept), -1)]
    assert 5 <= len(kept) <= 15


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
