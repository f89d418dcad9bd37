"""Seeded random draws, tied to a position in the text and a purpose."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Draws:
    """A random 64-bit number for each position, independent of the order of calls, so that sampled
    text is the same with and without speculation for one seed. Streams of other purposes are
    independent (Philox keys)."""

    def __init__(self, seed: int, purpose: int = 0) -> None:
        self._generator = generator(seed, purpose)
        self._drawn = np.empty(0, np.uint64)

    def at(self, position: int) -> int:
        while position >= len(self._drawn):
            more = self._generator.integers(0, 2**64, 256, np.uint64)
            self._drawn = np.concatenate([self._drawn, more])
        return int(self._drawn[position])


class Purpose(IntEnum):
    """What random numbers are for; each has its own stream."""

    POSITION = 0  # the target's own choices
    ACCEPTANCE = 1  # whether to accept a sampled draft token
    RECOVERY = 2  # the token in place of a rejected one
    DRAFT = 3


def generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose], np.uint64)))


def exponential(key: int | np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return [tokens] float64 exponential numbers: for token i, output i of SplitMix64 (Steele et
    al. 2014) from `key`. Keys [keys, 1] uint64 give [keys, tokens]."""
    bits = tokens.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = bits + np.asarray(key, np.uint64)
    shifted = np.empty_like(bits)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits ^= np.right_shift(bits, np.uint64(shift), out=shifted)
        bits *= np.uint64(factor)
    bits >>= np.uint64(12)
    uniform = bits.astype(np.float64)
    uniform += 0.5  # exact with 52 bits, never 0 or 1: results are positive
    uniform *= 2.0**-52
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


def pick(probabilities: np.ndarray, draw: float) -> int:
    """Return the first token whose cumulative probability exceeds `draw`."""
    cumulative = probabilities.cumsum(dtype=np.float64)
    token = int(cumulative.searchsorted(draw * cumulative[-1], side="right"))
    if token == len(cumulative):  # rounded up to the whole
        return int(np.flatnonzero(probabilities)[-1])
    return token
