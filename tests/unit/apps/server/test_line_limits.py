"""Texts that end at one of their lines."""

from __future__ import annotations

from itertools import count

import pytest

from edge_spec.apps.server.llamacpp import LineLimits


@pytest.mark.parametrize(
    ("text", "expected", "has_ended"),
    [
        ("a\n    b\n    c", "a\n    b\n    c", False),
        ("a\n    b\nc", "a\n    b\n", True),
        ("a\n  b\n    c", "a\n  ", True),
        ("a\n\n    b", "a\n", True),
        ("no indent at first\n\t\t\t\tx", "no indent at first\n\t\t\t\tx", False),
        ("a\n    ", "a\n    ", False),
        ("a\n", "a\n", False),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_line_that_is_indented_by_less_ends_a_text(
    text: str, expected: str, has_ended: bool, size: int
) -> None:
    limits = LineLimits(least_indent=4)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    told = "".join(map(limits.push, pieces))
    assert told + limits.finish() == limits.text == expected
    assert limits.has_ended == has_ended


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(2.5, "a\nb\n"), (3.5, "a\nb\nc\n"), (9, "a\nb\nc\nd"), (None, "a\nb\nc\nd")],
)
def test_a_text_ends_with_the_line_that_is_written_when_its_time_is_over(
    seconds: float | None, expected: str
) -> None:
    ticks = count()
    limits = LineLimits(seconds=seconds, clock=lambda: float(next(ticks)))
    told = "".join(map(limits.push, ["a", "\n", "b", "\nc", "\nd"]))
    assert told + limits.finish() == expected
