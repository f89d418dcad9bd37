"""Sequences that are taken out of a context, and put into another one."""

from __future__ import annotations

import ctypes

import numpy as np

from edge_spec.runtimes.llamacpp.library import Library


def read_sequence(library: Library, context: int, number: int) -> np.ndarray:
    """Returns [bytes] uint8, in the library's own form."""
    size = library.state_size(context, number)
    buffer = (ctypes.c_uint8 * size)()
    written = library.state_read(context, buffer, size, number)
    sequence: np.ndarray = np.ctypeslib.as_array(buffer)[:written]
    return sequence


def write_sequence(library: Library, context: int, sequence: np.ndarray, number: int) -> None:
    """Takes the place of what the sequence of this number was. Raises ValueError where the library
    does not take it."""
    writable = np.require(sequence, requirements=("C", "W"))  # from_buffer takes no other
    buffer = (ctypes.c_uint8 * len(sequence)).from_buffer(writable.data)
    read = library.state_write(context, buffer, len(sequence), number)
    if read != len(sequence):
        raise ValueError(f"{library.name} read {read} of {len(sequence)} bytes")
