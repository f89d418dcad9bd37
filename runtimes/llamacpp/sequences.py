"""Looks at sequences in the library's own form before the library gets them, which trusts what it
reads.

In such a sequence caches stand one after the other: that of the layers that see all of the text,
then that of the layers that see a window of it; or the state of recurrent layers.
"""

from __future__ import annotations

import numpy as np

from edge_spec.runtimes.llamacpp.library import SequenceForm

_MOST_LAYERS = 4096
# Of a cell, beside its position and its sequence: two more parts of a position and its token, where
# positions have several parts.
_EXTRA_WORDS = (0, 3)


def is_hybrid_sequence(stored: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Says whether it is one of attention and recurrent layers that have read `length` tokens."""
    return any(_is_hybrid(_Reader(stored, form, extra), length) for extra in _EXTRA_WORDS)


def is_windowed_sequence(stored: np.ndarray, start: int, end: int, form: SequenceForm) -> bool:
    """Says whether it is one of the tokens from `start` to `end`, in layers of both kinds."""
    reader = _Reader(stored, form, 0)
    try:
        for _ in ("whole", "window"):
            reader.attention(start, end - start)
    except ValueError:
        return False
    return reader.is_at_end


def is_recurrent_state(stored: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Says whether it is the state of recurrent layers alone."""
    return _ends_recurrent(_Reader(stored, form, 0), length)


def _is_hybrid(reader: _Reader, length: int) -> bool:
    try:
        reader.attention(0, length)
    except ValueError:
        return False
    return _ends_recurrent(reader, length)


def _ends_recurrent(reader: _Reader, length: int) -> bool:
    try:
        # One cell, its position, and no sequence that it names.
        return bool(reader.words(3) == [1, length - 1, 0])
    except ValueError:
        return False


class _Reader:
    """Reads [bytes] uint8 from the beginning on. Raises ValueError for what no library has
    written."""

    def __init__(self, stored: np.ndarray, form: SequenceForm, extra_words: int) -> None:
        """Begins after what stands before the first cache."""
        self._bytes = stored
        self._form = form
        self._cell_words = 1 + len(form.cell) + extra_words
        self._at = 4 * (form.words_before - 1)

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
        if not in_place or (cells[:, 1] != self._form.cell[0]).any():
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
