"""Sequences that were taken out of a context, in the library's own form.

The library trusts what it reads, so `is_sequence` looks at it before. After two words of 32 bits
come the cache of the layers that see all of the text, then that of the layers that see a window of
it, or the state of recurrent layers. A cache has the number of its streams and of its cells, for
each cell its position and its one sequence, then keys and values by layers, which the library
checks.
"""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np

from edge_spec.runtimes.llamacpp.context import Context

WORDS_BEFORE, CELL_WORDS = 2, 3  # the first cache; a position, one sequence, and its number
_MOST_LAYERS = 4096
# Of a cell, beside its position and its sequence: two more parts of a position and its token, where
# positions have several parts.
_EXTRA_WORDS = (0, 3)


def is_sequence(
    stored: np.ndarray, length: int, start: int = 0, caches: int = 1, is_recurrent: bool = False
) -> bool:
    """Say whether it is one of the tokens from `start` up to `length`, in as many caches of
    attention layers, then the state of recurrent ones if there are any.

    A library would read any number of cells, beyond its memory, and at any position."""
    for extra_words in _EXTRA_WORDS if is_recurrent else _EXTRA_WORDS[:1]:
        reader = _Reader(stored, extra_words)
        with suppress(ValueError):
            for _ in range(caches):
                reader.attention(start, length - start)
            # One cell, its position, and no sequence that it names.
            if reader.words(3) == [1, length - 1, 0] if is_recurrent else reader.is_at_end:
                return True
    return False


class _Reader:
    """Reads [bytes] uint8 from the beginning on. Raises ValueError for what no library has
    written."""

    def __init__(self, stored: np.ndarray, extra_words: int) -> None:
        """Begins with the first cache."""
        self._bytes = stored
        self._cell_words = CELL_WORDS + extra_words
        self._at = 4 * WORDS_BEFORE

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._bytes)

    def attention(self, start: int, length: int) -> None:
        """Passes a cache that holds the positions from `start` on, `length` of them, each once."""
        _, count = self.words(2)
        if count != length:
            raise ValueError(f"{count} cells for {length} tokens")
        cells = np.reshape(self.words(length * self._cell_words), (length, self._cell_words))
        in_place = np.array_equal(np.sort(cells[:, 0]), np.arange(start, start + length))
        if not in_place or (cells[:, 1] != 1).any():
            raise ValueError("cells of another text")
        is_turned, num_layers = self.words(2)
        if num_layers > _MOST_LAYERS:
            raise ValueError(f"{num_layers} layers")
        for of_keys in [True] * num_layers + [False] * num_layers:
            if of_keys or not is_turned:
                _, low, high = self.words(3)  # a type, and the bytes of a token
                self._skip((low + (high << 32)) * length)
            else:
                _, size, width = self.words(3)
                self._skip(size * width * length)

    def words(self, count: int) -> list[int]:
        start = self._at
        self._skip(4 * count)
        found: list[int] = np.frombuffer(self._bytes[start : self._at].tobytes(), "<u4").tolist()
        return found

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._bytes) - self._at:
            raise ValueError("it ends before")
        self._at += num_bytes


_SIZE = struct.Struct("<Q")


def read_windowed(context: Context, number: int, length: int, window: int) -> np.ndarray:
    """Returns a sequence in parts of a window's length, each after its size in 8 bytes: of a whole
    one the library leaves out what the window has passed, and could not be rolled back."""
    found, [spare] = [np.empty(0, np.uint8)], context.take_numbers(1)
    context.give_back([spare])
    for start in range(0, length, window):
        context.copy(number, spare, start, min(start + window, length))
        part = context.read(spare)
        context.remove(spare)
        found += [np.frombuffer(_SIZE.pack(len(part)), np.uint8), part]
    return np.concatenate(found)


def write_windowed(context: Context, number: int, sequence: np.ndarray) -> None:
    """Writes what `read_windowed` has read. Raises ValueError where the library does not take
    it."""
    [spare] = context.take_numbers(1)
    context.give_back([spare])
    context.remove(number)
    for part in _parts(sequence):
        context.write(part, spare)
        context.copy(spare, number)
        context.remove(spare)


def holds_windowed(sequence: np.ndarray, length: int, window: int) -> bool:
    """Returns whether it is in the form of `read_windowed`, of `length` tokens."""
    ends = [min(start + window, length) for start in range(0, length, window)]
    try:
        parts = _parts(sequence)
    except ValueError:
        return False
    return len(parts) == len(ends) and all(
        is_sequence(part, end, start * window, caches=2)  # whole layers', and a window's
        for start, (part, end) in enumerate(zip(parts, ends, strict=True))
    )


def _parts(sequence: np.ndarray) -> list[np.ndarray]:
    """Raises ValueError."""
    found, at = [], 0
    while at < len(sequence):
        start = at + _SIZE.size
        if start > len(sequence):
            raise ValueError("it ends within a size")
        (size,) = _SIZE.unpack(sequence[at:start].tobytes())
        if size > len(sequence) - start:
            raise ValueError("it ends within a part")
        found.append(sequence[start : start + size])
        at = start + size
    return found
