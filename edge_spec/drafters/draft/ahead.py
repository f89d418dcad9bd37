"""Keeps what a draft has read ahead of a text, so that it goes on while the target verifies.

Drafting and verifying at the same time, on devices of their own, for the outcomes that are likely
(Bhendawade et al. 2025, Mirror Speculative Decoding, arXiv 2510.13161; Liu et al. 2024, PEARL,
arXiv 2408.11850). An outcome is a path of tokens: draft tokens that are accepted and one more
token, or none and another token. What the draft says after a path depends on the path alone, so it
may be asked before the outcome is known and is as good a draft token afterwards.

Samples, too. After each path the draft samples at most once, with a number that nothing else
uses, and whether a sample is ever proposed is decided by the text up to it: by the outcome, whose
random numbers are of other streams (sampling.Purpose), and by time. Given the text before it, a
sample that is proposed is therefore distributed as its draft_probs say and independent of what
decides it, which is all that verification asks for. It is proposed once at most: the text that it
follows is left behind by the round that verifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

Path = tuple[int, ...]

_LEAST_CHANCE = 0.02  # that the text takes a path, below which reading it is a waste
_MOST_READ = 64  # paths at a time: each may hold a distribution


class AheadChoice(NamedTuple):
    """A token that may follow, the kind of draft token it is, and what it was sampled from,
    [vocab]."""

    token: int
    kind: int
    draft_probs: np.ndarray | None


Ranks = Sequence[tuple[int, int]]  # token and kind of what may follow, the likeliest first


class Reading:
    """Holds what the draft says after a path: its draft token, and what is likeliest there, which
    is looked for when it is first asked for: not while a target waits for draft tokens."""

    def __init__(self, candidate: AheadChoice, rank: Callable[[], Ranks]) -> None:
        self.candidate = candidate
        self._rank = rank

    @cached_property
    def likeliest(self) -> Ranks:
        likeliest = self._rank()
        del self._rank  # which holds a whole distribution
        return likeliest


class DraftAheadCache:
    """Readings by the tokens between the text and what they draft."""

    def __init__(self) -> None:
        self._readings: dict[Path, Reading] = {}

    def get(self, path: Sequence[int]) -> Reading | None:
        return self._readings.get(tuple(path))

    def add(self, path: Sequence[int], reading: Reading) -> None:
        self._readings[tuple(path)] = reading

    def follow(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`: what was read after others is forgotten."""
        start, length = tuple(tokens), len(tokens)
        self._readings = {
            path[length:]: reading
            for path, reading in self._readings.items()
            if path[:length] == start
        }

    def clear(self) -> None:
        self._readings.clear()

    def grow(
        self,
        read: Callable[[Path], Reading],
        estimate: Callable[[int], float],
        max_length: int,
        stopped: Callable[[], bool],
    ) -> None:
        """Reads the paths that the text is likeliest to take, until no likely one is left, there
        are too many, or `stopped`, which is asked before each.

        estimate: the chance that a draft token of a kind is right. max_length: of a path.
        """
        paths: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
        pushed = 0
        while paths and len(self._readings) < _MOST_READ and not stopped():
            negative, _, path = heappop(paths)
            if path not in self._readings:
                self._readings[path] = read(path)
            if len(path) == max_length:
                continue
            reading = self._readings[path]
            followers = dict([reading.candidate[:2], *reading.likeliest])
            for token, kind in followers.items():
                chance = -negative * estimate(kind)
                if chance >= _LEAST_CHANCE:
                    pushed += 1
                    heappush(paths, (-chance, pushed, (*path, token)))
