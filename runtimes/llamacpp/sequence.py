"""A sequence as the libraries write it down, which they trust when they read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SequenceForm(NamedTuple):
    """`words_before`, then the number of cells, then for each cell its position and `cell`, in
    words of 32 bits. Keys and values by layers follow, whose types and sizes a library checks."""

    words_before: int
    cell: tuple[int, ...]


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
