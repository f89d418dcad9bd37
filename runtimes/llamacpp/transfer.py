"""Takes sequences out of a context, and puts them into another one.

The library trusts what it reads, so `holds` looks at a sequence in its form before. In such a
sequence caches stand one after the other: that of the layers that see all of the text, then that of
the layers that see a window of it; or the state of recurrent layers.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from edge_spec.runtimes.llamacpp.library import Library, SequenceForm

_MOST_LAYERS = 4096
# Of a cell, beside its position and its sequence: two more parts of a position and its token, where
# positions have several parts.
_EXTRA_WORDS = (0, 3)


def is_hybrid_sequence(stored: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Says whether it is one of attention and recurrent layers that have read `length` tokens."""
    return any(_is_hybrid(_Reader(stored, form, extra), length) for extra in _EXTRA_WORDS)


def holds(stored: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Says whether it is one of attention layers that have read `length` tokens.

    A library would read any number of cells, beyond its memory, and at any position."""
    return not length or _has_caches(stored, 0, length, form, 1)


def _has_caches(
    stored: np.ndarray, start: int, end: int, form: SequenceForm, num_caches: int
) -> bool:
    """Says whether it is one of the tokens from `start` to `end`, in as many caches."""
    reader = _Reader(stored, form, 0)
    try:
        for _ in range(num_caches):
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


_SIZE = struct.Struct("<Q")
WHOLE, RECURRENT = 0, 1  # llama_state_seq_flags: all layers, or those with a recurrent state


def read_sequence(library: Library, context: int, number: int, part: int = WHOLE) -> np.ndarray:
    """Returns [bytes] uint8, in the library's own form."""
    size = library.state_size(context, number, part)
    buffer = (ctypes.c_uint8 * size)()
    written = library.state_read(context, buffer, size, number, part)
    sequence: np.ndarray = np.ctypeslib.as_array(buffer)[:written]
    return sequence


def write_sequence(
    library: Library, context: int, sequence: np.ndarray, number: int, part: int = WHOLE
) -> None:
    """Takes the place of what the sequence of this number was. Raises ValueError where the library
    does not take it."""
    writable = np.require(sequence, requirements=("C", "W"))  # from_buffer takes no other
    buffer = (ctypes.c_uint8 * len(sequence)).from_buffer(writable.data)
    read = library.state_write(context, buffer, len(sequence), number, part)
    if read != len(sequence):
        raise ValueError(f"{library.name} read {read} of {len(sequence)} bytes")


def read_windowed(
    library: Library, context: int, numbers: tuple[int, int], length: int, window: int
) -> np.ndarray:
    """Returns a sequence in parts of a window's length, each after its size in 8 bytes: of a whole
    one the library leaves out what the window has passed, and could not be rolled back. numbers:
    its own, and one that is in no use."""
    memory, found, (own, spare) = library.memory(context), [], numbers
    for start in range(0, length, window):
        library.sequence_copy(memory, own, spare, start, min(start + window, length))
        part = read_sequence(library, context, spare)
        library.sequence_remove(memory, spare, -1, -1)
        found += [np.frombuffer(_SIZE.pack(len(part)), np.uint8), part]
    return np.concatenate(found) if found else np.empty(0, np.uint8)


def write_windowed(
    library: Library, context: int, numbers: tuple[int, int], sequence: np.ndarray
) -> None:
    """Writes what `read_windowed` has read. Raises ValueError where the library does not take
    it."""
    memory, (own, spare) = library.memory(context), numbers
    library.sequence_remove(memory, own, -1, -1)
    for part in _parts(sequence):
        write_sequence(library, context, part, spare)
        library.sequence_copy(memory, spare, own, -1, -1)
        library.sequence_remove(memory, spare, -1, -1)


def holds_windowed(sequence: np.ndarray, length: int, window: int, form: SequenceForm) -> bool:
    """Returns whether it is in the form of `read_windowed`, of `length` tokens."""
    ends = [min(start + window, length) for start in range(0, length, window)]
    try:
        parts = _parts(sequence)
    except ValueError:
        return False
    return len(parts) == len(ends) and all(
        _has_caches(part, start * window, end, form, 2)  # whole layers', and a window's
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
