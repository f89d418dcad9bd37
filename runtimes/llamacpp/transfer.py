"""Takes sequences out of a context, and puts them into another one.

A library trusts what it reads: `holds` looks at it before."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from edge_spec.runtimes.llamacpp.library import Library, SequenceForm
from edge_spec.runtimes.llamacpp.sequences import is_windowed_sequence

_PART = 1  # a sequence that is in no use between passes
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


def read_windowed(library: Library, context: int, length: int, window: int) -> np.ndarray:
    """Returns sequence 0 in parts of a window's length, each after its size in 8 bytes: of a whole
    one the library leaves out what the window has passed, and could not be rolled back."""
    memory, found = library.memory(context), []
    for start in range(0, length, window):
        library.sequence_copy(memory, 0, _PART, start, min(start + window, length))
        part = read_sequence(library, context, _PART)
        library.sequence_remove(memory, _PART, -1, -1)
        found += [np.frombuffer(_SIZE.pack(len(part)), np.uint8), part]
    return np.concatenate(found) if found else np.empty(0, np.uint8)


def write_windowed(library: Library, context: int, sequence: np.ndarray) -> None:
    """Writes what `read_windowed` has read. Raises ValueError where the library does not take
    it."""
    memory = library.memory(context)
    library.sequence_remove(memory, 0, -1, -1)
    for part in _parts(sequence):
        write_sequence(library, context, part, _PART)
        library.sequence_copy(memory, _PART, 0, -1, -1)
        library.sequence_remove(memory, _PART, -1, -1)


def holds_windowed(sequence: np.ndarray, length: int, window: int, form: SequenceForm) -> bool:
    """Returns whether it is in the form of `read_windowed`, of `length` tokens."""
    ends = [min(start + window, length) for start in range(0, length, window)]
    try:
        parts = _parts(sequence)
    except ValueError:
        return False
    return len(parts) == len(ends) and all(
        is_windowed_sequence(part, start * window, end, form)
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


def as_first(sequence: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Gives its cells the number of a sequence that stands in a context alone; returns whether
    there are so many."""
    start, width = 4 * (form.words_before + 1), 1 + len(form.cell)
    cells = sequence[start : start + 4 * length * width]
    if len(cells) < 4 * length * width:
        return False
    cells.view("<u4").reshape(length, width)[:, -1] = form.cell[-1]
    return True


def holds(sequence: np.ndarray, length: int, form: SequenceForm) -> bool:
    """Returns whether the cells of a sequence, [bytes] uint8, have the positions 0 to length - 1,
    each once.

    A library would read any number of cells, beyond its memory, and at any position."""
    start, width = form.words_before + 1, 1 + len(form.cell)
    words = sequence[: 4 * (start + length * width)]
    if len(words) < 4 * (start + length * width):
        return False
    numbers = np.frombuffer(words.tobytes(), "<u4")
    cells = numbers[start:].reshape(length, width)
    in_place = np.array_equal(np.sort(cells[:, 0]), np.arange(length))
    return bool(numbers[start - 1] == length and in_place and (cells[:, 1:] == form.cell).all())
