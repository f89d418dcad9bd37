"""Takes sequences out of a context, and puts them into another one.

A library trusts what it reads: `holds` looks at it before."""

from __future__ import annotations

import ctypes

import numpy as np

from edge_spec.runtimes.llamacpp.library import Library, SequenceForm

_WHOLE = 0  # llama_state_seq_flags


def read_sequence(library: Library, context: int, number: int) -> np.ndarray:
    """Returns [bytes] uint8, in the library's own form."""
    size = library.state_size(context, number, _WHOLE)
    buffer = (ctypes.c_uint8 * size)()
    written = library.state_read(context, buffer, size, number, _WHOLE)
    sequence: np.ndarray = np.ctypeslib.as_array(buffer)[:written]
    return sequence


def write_sequence(library: Library, context: int, sequence: np.ndarray, number: int) -> None:
    """Takes the place of what the sequence of this number was. Raises ValueError where the library
    does not take it."""
    writable = np.require(sequence, requirements=("C", "W"))  # from_buffer takes no other
    buffer = (ctypes.c_uint8 * len(sequence)).from_buffer(writable.data)
    read = library.state_write(context, buffer, len(sequence), number, _WHOLE)
    if read != len(sequence):
        raise ValueError(f"{library.name} read {read} of {len(sequence)} bytes")


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
