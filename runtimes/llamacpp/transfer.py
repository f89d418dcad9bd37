"""Sequences taken out of a context, in the library's format.

The library trusts what it reads, so `is_sequence` checks it. After two 32-bit words come the cache
of full attention, then that of sliding windows or the recurrent state. A cache has its number of
streams and cells, each cell's position and single sequence, then keys and values by layer, which
the library checks.
"""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np

from edge_spec.runtimes.llamacpp.context import Context

WORDS_BEFORE, CELL_WORDS = 2, 3  # before the first cache; position, number of sequences, sequence
_MOST_LAYERS = 4096
# More words of a cell with multi-part positions: two parts and the token.
_EXTRA_WORDS = (0, 3)


def is_sequence(
    stored: np.ndarray, length: int, start: int = 0, caches: int = 1, is_recurrent: bool = False
) -> bool:
    """Check for a sequence of tokens `start` to `length` in this many attention caches, then a
    recurrent state if any. The library would read any number of cells, past its memory, at any
    position."""
    for extra_words in _EXTRA_WORDS if is_recurrent else _EXTRA_WORDS[:1]:
        reader = _Reader(stored, extra_words)
        with suppress(ValueError):
            for _ in range(caches):
                reader.attention(start, length - start)
            # One cell with its position and no sequence.
            if reader.words(3) == [1, length - 1, 0] if is_recurrent else reader.is_at_end:
                return True
    return False


class _Reader:
    """Reads [bytes] uint8. Raises ValueError for what the library never writes."""

    def __init__(self, stored: np.ndarray, extra_words: int) -> None:
        self._bytes = stored
        self._cell_words = CELL_WORDS + extra_words
        self._at = 4 * WORDS_BEFORE

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._bytes)

    def attention(self, start: int, length: int) -> None:
        """Skip a cache of `length` positions from `start`, each once."""
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
                _, low, high = self.words(3)  # type, bytes per token
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
    """Return a sequence in window-sized parts after 8-byte sizes. As a whole it would lack what the
    window has passed, and could not be rolled back."""
    found, [spare] = [np.empty(0, np.uint8)], context.take_numbers(1)
    context.give_back([spare])
    for start in range(0, length, window):
        context.copy(number, spare, start, min(start + window, length))
        part = context.read(spare)
        context.remove(spare)
        found += [np.frombuffer(_SIZE.pack(len(part)), np.uint8), part]
    return np.concatenate(found)


def write_windowed(context: Context, number: int, sequence: np.ndarray) -> None:
    """Write what `read_windowed` returned. Raises ValueError if the library refuses it."""
    [spare] = context.take_numbers(1)
    context.give_back([spare])
    context.remove(number)
    for part in _parts(sequence):
        context.write(part, spare)
        context.copy(spare, number)
        context.remove(spare)


def holds_windowed(sequence: np.ndarray, length: int, window: int) -> bool:
    """Check for the format of `read_windowed` with `length` tokens."""
    ends = [min(start + window, length) for start in range(0, length, window)]
    try:
        parts = _parts(sequence)
    except ValueError:
        return False
    return len(parts) == len(ends) and all(
        is_sequence(part, end, start * window, caches=2)  # full and windowed layers
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
