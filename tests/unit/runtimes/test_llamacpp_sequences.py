"""Sequences in the library's form that are not what they say are refused before it gets them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from edge_spec.runtimes.llamacpp.transfer import (
    holds_windowed,
    is_sequence,
)

LENGTH, WINDOW = 5, 2
Check = Callable[[np.ndarray], bool]


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def attention(start: int, end: int, turned: bool = False, extra: int = 0) -> bytes:
    """A cache of one layer, whose keys and values have 8 bytes a token."""
    cells = b"".join(words(at, 1, *[0] * extra, 0) for at in range(start, end))
    rows = words(1, 8, 0) + bytes(8 * (end - start))
    values = words(1, 2, 4) + bytes(8 * (end - start)) if turned else rows
    return words(1, end - start) + cells + words(turned, 1) + rows + values


def recurrent(length: int) -> bytes:
    return words(1, length - 1, 0) + words(0, 1, 0, 4, 0) + bytes(4)


def stored(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def windowed() -> bytes:
    found = b""
    for start in range(0, LENGTH, WINDOW):
        end = min(start + WINDOW, LENGTH)
        part = words(7, 1) + attention(start, end) + attention(start, end)
        found += struct.pack("<Q", len(part)) + part
    return found


HYBRID = words(7, 0) + attention(0, LENGTH) + recurrent(LENGTH)
CASES: dict[str, tuple[bytes, Check]] = {
    "hybrid": (HYBRID, lambda each: is_sequence(each, LENGTH, is_recurrent=True)),
    "values turned": (
        words(7, 0) + attention(0, LENGTH, turned=True) + recurrent(LENGTH),
        lambda each: is_sequence(each, LENGTH, is_recurrent=True),
    ),
    "positions of several parts": (
        words(7, 0) + attention(0, LENGTH, extra=3) + recurrent(LENGTH),
        lambda each: is_sequence(each, LENGTH, is_recurrent=True),
    ),
    "windowed": (windowed(), lambda each: holds_windowed(each, LENGTH, WINDOW)),
    "recurrent": (
        words(7, 0) + recurrent(LENGTH),
        lambda each: is_sequence(each, LENGTH, caches=0, is_recurrent=True),
    ),
}


@pytest.mark.parametrize(("content", "check"), CASES.values(), ids=CASES)
def test_a_sequence_is_known_and_what_is_cut_short_is_not(content: bytes, check: Check) -> None:
    assert check(stored(content))
    in_head = len(words(7, 0, 1, LENGTH - 1))  # what follows in a state the library reads itself
    for end in range(in_head if content.startswith(words(7, 0, 1)) else 60):
        assert not check(stored(content[:end]))


@pytest.mark.parametrize("word", range(2, 2 + 2 + 3 * LENGTH, 1))
@pytest.mark.parametrize("value", [2**32 - 1, 2**31, 77])
def test_other_counts_positions_and_sequences_are_refused(word: int, value: int) -> None:
    is_free = word == 2 or (
        word > 3 and (word - 4) % 3 == 2
    )  # streams, and a number that is passed
    changed = bytearray(HYBRID)
    changed[4 * word : 4 * word + 4] = words(value)
    assert is_sequence(stored(bytes(changed)), LENGTH, is_recurrent=True) is is_free


def test_a_sequence_of_another_length_is_refused() -> None:
    assert not is_sequence(stored(HYBRID), LENGTH - 1, is_recurrent=True)
    assert not holds_windowed(stored(windowed()), LENGTH + 1, WINDOW)
    assert not holds_windowed(stored(windowed() + bytes(3)), LENGTH, WINDOW)
